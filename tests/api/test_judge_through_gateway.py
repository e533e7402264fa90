"""A judge asked through a gateway: its answers name the turns that the gateway records."""

from __future__ import annotations

import pytest

from clawloop.core.ids import new_turn_id
from clawloop.core.judging.prompts import AnswerForm, JudgeReply, vote_prompt
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import JudgeClient
from tests.api.conftest import Gateway
from tests.unit.judging.conversations import evidence


@pytest.mark.parametrize("votes", [1, 3])
async def test_each_answer_names_its_turn(fresh_gateway: Gateway, votes: int) -> None:
    gateway = fresh_gateway
    prompt = vote_prompt(new_turn_id(), evidence())
    relayed, direct = (Endpoint(url, "policy", gateway.key) for url in (gateway.url, gateway.engine.url))
    async with JudgeClient(lambda _: [relayed], AnswerForm.FREE) as judge:
        answers = await judge.answers("default", prompt, votes, 0.6)
    async with JudgeClient(lambda _: [direct], AnswerForm.FREE) as judge:
        assert {answer.reply for answer in await judge.answers("default", prompt, votes, 0.6)} == {None}
    turns = sorted(await gateway.recorded(votes), key=lambda turn: turn.choice)
    first = turns[0].turn_id
    assert [answer.reply for answer in answers] == [JudgeReply(first, choice) for choice in range(votes)]
    assert [turn.choice for turn in turns] == list(range(votes))
    assert {turn.group_id for turn in turns} == {first if votes > 1 else None}
    assert [turn.kind.value for turn in turns] == ["main"] * votes
