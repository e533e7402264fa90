"""Lists whose first wrong entry ends their validation: a million errors would hold a gateway for seconds."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
