"""Lists whose first wrong entry ends their validation: a million errors would hold a gateway for seconds."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast, Field

Objects = Annotated[list[dict[str, Any]], FailFast()]
Texts = Annotated[list[str], FailFast()]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FailFast()]
