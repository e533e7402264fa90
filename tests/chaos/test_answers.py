"""Which answers a fault excuses."""

from __future__ import annotations

from collections import Counter

import orjson
import pytest

from tests.chaos.chatters import inexcusable
from tests.chaos.fuzzer import problem_of

OPENAI = {"error": {"message": "m", "type": "t", "param": None, "code": "c"}}
ANTHROPIC = {"type": "error", "error": {"message": "m", "type": "t"}}
ADMIN = {"status": 503, "detail": "PostgreSQL does not answer"}


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/v1/chat/completions", 200, {}),
        ("/v1/chat/completions", 503, OPENAI),
        ("/v1/feedback", 404, OPENAI),
        ("/v1/messages", 502, ANTHROPIC),
        ("/v1/messages/count_tokens", 400, ANTHROPIC),
        ("/admin/v1/status", 503, ADMIN),
        ("/readyz", 503, {"status": "not ready"}),
    ],
)
def test_refusals_and_errors_that_name_what_is_away_are_excused(path: str, status: int, body: object) -> None:
    assert problem_of(path, status, orjson.dumps(body)) is None


@pytest.mark.parametrize(
    ("path", "status", "content"),
    [
        ("/v1/chat/completions", 500, orjson.dumps(OPENAI)),
        ("/readyz", 500, b"{}"),
        ("/v1/chat/completions", 503, b"Service Unavailable"),
        ("/v1/responses", 400, orjson.dumps(ANTHROPIC)),
        ("/v1/messages", 400, orjson.dumps(OPENAI)),
        ("/admin/v1/status", 503, orjson.dumps(ADMIN | {"status": 500})),
        ("/admin/v1/status", 503, orjson.dumps(OPENAI)),
        ("/admin/v1/status", 503, b"[]"),
    ],
)
def test_a_500_and_an_error_in_no_form_are_not_excused(path: str, status: int, content: bytes) -> None:
    assert problem_of(path, status, content) is not None


def test_what_a_gateway_refuses_or_takes_upon_itself_no_fault_excuses() -> None:
    excused = Counter({"503 no_engine": 4, "ReadTimeout": 1, "stream ended: engine_broke": 3})
    failures = excused + Counter({"404 model_not_found": 2, "500 internal_error": 1, "stream ended: internal_error": 1})
    assert inexcusable(excused) == []
    assert sorted(inexcusable(failures)) == [
        "1 chats failed: 500 internal_error",
        "1 chats failed: stream ended: internal_error",
        "2 chats failed: 404 model_not_found",
    ]
