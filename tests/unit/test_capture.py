"""What is collected from an engine's chunks, including malformed ones."""

from __future__ import annotations

from typing import Any

import pytest

from api.chat.capture import Capture


def _chunk(delta: Any, ids: Any = None, finish: Any = None, index: Any = 0) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
    if ids is not None:
        choice |= {"token_ids": ids, "logprobs": {"content": [{"logprob": -1.0} for _ in ids]}}
    return {"choices": [choice]}


def _capture() -> Capture:
    return Capture(choices=1, keep_logprobs=False, keep_ids=False)


@pytest.mark.parametrize(
    "chunk",
    [
        _chunk({"content": "a"}, [1], finish=["stop"]),
        _chunk({"content": "a"}, [1], finish=7),
        _chunk({"content": "a"}, [1], index=-1),
        _chunk({"content": "a"}, [1], index=1),
        _chunk({"content": "a"}, [1], index="0"),
        _chunk({"tool_calls": [{"index": "x"}]}, [1]),
        _chunk(["a"]),
        {"choices": 5},
        {},
    ],
)
def test_a_malformed_chunk_is_refused(chunk: dict[str, Any]) -> None:
    with pytest.raises((AttributeError, IndexError, KeyError, TypeError)):
        _capture().take_chunk(chunk)


def test_text_without_tokens_discards_all_tokens_of_the_choice() -> None:
    capture = _capture()
    capture.take_chunk(_chunk({"content": "a"}, [1]))
    capture.take_chunk(_chunk({"content": "b"}))
    [choice] = capture.choices
    assert (choice.response_ids, choice.logprobs) == (None, None)
    assert choice.unusable == "the engine sent text without token ids"
    assert choice.message() == {"role": "assistant", "content": "ab"}


@pytest.mark.parametrize("ids", [[2**40], [-1], [True], ["a"]])
def test_invalid_ids_are_discarded(ids: list[Any]) -> None:
    capture = _capture()
    capture.take_chunk(_chunk({"content": "a"}, ids))
    assert capture.choices[0].response_ids is None
