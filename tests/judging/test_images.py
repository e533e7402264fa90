"""Turns with content that a trainer cannot see."""

from __future__ import annotations

from typing import Any

from clawloop.contracts.turns import Message, TurnOutcome
from tests.judging.conftest import Bench


async def test_a_turn_with_an_image_is_judged_and_gives_no_sample(binary_bench: Bench) -> None:
    bench = binary_bench
    image: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    shown: list[Message] = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
    turns = bench.conversation(shown, "No, look again.", "Thanks.")
    session = await bench.insert(*turns)
    for turn in turns[1:]:
        (result,) = await bench.judge_turn(session, turn)
        assert (result.verdict, result.outcome, result.sample) == (1, TurnOutcome.NOT_TRAINABLE, False)
        assert result.why.startswith("not trainable: image in the prompt (verdict +1")
    assert "[image: image/png]" in bench.judge.requests[0]["messages"][-1]["content"]
    assert "iVBORw0KGgo=" not in str(bench.judge.requests)
    assert bench.rows("SELECT * FROM samples") == []
