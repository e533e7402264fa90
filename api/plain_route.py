"""A route of FastAPI's documentation that Starlette serves: for chats, where each millisecond of CPU counts."""

from __future__ import annotations

from inspect import signature
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import request_response


class PlainRoute(APIRoute):
    """Calls an endpoint that takes the request alone, and returns a response, without FastAPI's dependencies.

    FastAPI opens two exit stacks and solves no dependencies for such an endpoint: a tenth of a short chat's CPU. An
    endpoint with other parameters is served by FastAPI.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if list(signature(self.endpoint).parameters) == ["request"]:
            self.app = request_response(self.endpoint)
