"""What is counted of a request's tokens, whatever becomes of them."""

from __future__ import annotations

from typing import Any

import pytest

from api.chat.key_limits import Pace, TokenMeter


def chunk(ids: list[int] | None, prompt: int = 0, **fields: Any) -> dict[str, Any]:
    said = {"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": ids}], **fields}
    return said | ({"prompt_token_ids": [1] * prompt} if prompt else {})


def take(meter: TokenMeter, *chunks: dict[str, Any]) -> None:
    for one in chunks:
        meter.take(one, one)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("api.chat.key_limits.time.monotonic", lambda: now[0])
    return now


def test_prompt_and_reply_are_counted_over_all_attempts() -> None:
    meter = TokenMeter(1, None)
    meter.begin()
    take(meter, chunk([5, 6], prompt=10), chunk([7]))
    assert meter.total() == 13
    meter.begin()
    take(meter, chunk([5], prompt=10))
    assert meter.total() == 13 + 11


def test_without_ids_parts_are_counted_or_what_the_engine_reports() -> None:
    meter = TokenMeter(1, None)
    start = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    take(meter, start, chunk(None), chunk(None))
    assert meter.total() == 2
    take(meter, {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}})
    assert meter.total() == 9


@pytest.mark.parametrize("usage", ["x", [], {"total_tokens": "x"}, {"total_tokens": -5}, {}])
def test_an_odd_report_counts_nothing(usage: Any) -> None:
    meter = TokenMeter(1, None)
    take(meter, chunk([5], usage=usage))
    assert meter.total() == 1


def test_a_request_that_is_cut_before_its_answer_counts_by_time(clock: list[float]) -> None:
    pace = Pace()
    ended = TokenMeter(2, None)
    ended.sending(400)
    take(ended, chunk([1] * 40))
    clock[0] += 2
    ended.set_pace(pace)  # 20 tokens in 2 s for each of two choices
    assert pace.tokens_in(3) == 30

    cut = TokenMeter(2, None)
    assert cut.total_of_cut(pace) == 0  # no engine had it
    cut.sending(400)
    clock[0] += 3
    assert cut.total_of_cut(pace) == 100 + 2 * 30
    bounded = TokenMeter(2, 7)
    bounded.sending(400)
    clock[0] += 3
    assert bounded.total_of_cut(pace) == 100 + 2 * 7
    take(bounded, chunk([1], prompt=10))
    assert bounded.total_of_cut(pace) == 11  # known, so nothing is estimated


def test_the_pace_is_that_of_the_newest_replies() -> None:
    pace = Pace()
    assert pace.tokens_in(10) == 0
    for _ in range(60):
        pace.take(10, 1)
    for _ in range(60):
        pace.take(50, 1)
    assert 49 <= pace.tokens_in(1) <= 50
