"""A direct vote: one constrained token, whose probabilities are read, stored and reused."""

from __future__ import annotations

import json
import math

import pytest

from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import JudgeUnavailable
from clawloop.core.recipes.recipe import Recipe
from tests.judging.conftest import Bench, set_recipe, with_signal

DIRECT = with_signal(votes="direct")


@pytest.fixture
async def direct_bench(grammar_bench: Bench) -> Bench:
    await set_recipe(grammar_bench, DIRECT)
    return grammar_bench


async def test_one_token_at_temperature_1_is_the_vote(direct_bench: Bench) -> None:
    bench = direct_bench
    first, second = bench.conversation("one", "No, wrong.")
    session = await bench.insert(first, second)
    bench.judge.direct = {"-": math.log(0.7), "1": math.log(0.1), "0": math.log(0.2), "x": -9999.0}
    (result,) = await bench.judge_turn(session, second)
    assert (result.verdict, result.outcome, result.why) == (-1, TurnOutcome.SAMPLED, "verdict bad: direct vote -0.60")
    (request,) = bench.judge.requests
    asked = {name: request[name] for name in ("temperature", "max_tokens", "logprobs", "top_logprobs")}
    assert asked == {"temperature": 1.0, "max_tokens": 1, "logprobs": True, "top_logprobs": 20}
    assert request["structured_outputs"] == {"choice": ["1", "0", "-1"]}
    assert request["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    (vote,) = bench.rows("SELECT kind, index, raw, score FROM votes")
    assert (vote["kind"], vote["index"], vote["score"]) == ("direct", 0, -1)
    assert json.loads(vote["raw"])["-1"] == pytest.approx(math.log(0.7))
    (judgement,) = bench.rows("SELECT verdict, expected FROM judgements")
    assert judgement == {"verdict": -1, "expected": pytest.approx(-0.6)}
    assert bench.rows("SELECT reward FROM samples") == [{"reward": -1.0}]
    assert bench.counted("judge_answers_total", kind="vote", result="valid") == 1


async def test_a_retry_does_not_ask_for_it_again(direct_bench: Bench) -> None:
    bench = direct_bench
    await set_recipe(bench, Recipe.model_validate({"name": "combined", "signal": {"votes": "direct"}}))
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    bench.judge.says = lambda body, question: 1 / 0  # type: ignore[assignment, return-value]  # hints break it
    with pytest.raises(JudgeUnavailable):
        await bench.judge_turn(session, second)
    bench.judge.says = None
    (result,) = await bench.judge_turn(session, second)
    assert result.verdict == 1
    assert [len(bench.judge.asked(what)) for what in ("vote", "hint")] == [1, 2]


async def test_a_judge_that_answers_freely_leaves_the_turn_unjudged_and_names_the_setting(bench: Bench) -> None:
    await set_recipe(bench, DIRECT)
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    (result,) = await bench.judge_turn(session, second)
    assert (result.outcome, bench.judge.requests) == (TurnOutcome.UNJUDGED, [])
    assert result.why.startswith('no direct vote (signal.votes = "direct" needs a judge with a grammar')
    stored = await bench.turn(first.turn_id)
    assert stored.outcome_detail is not None
    assert 'set votes = "sampled", or CLAWLOOP_JUDGE_FORM=grammar' in stored.outcome_detail


@pytest.mark.parametrize("reported", [None, {"1": -0.1, "0": -2.0}, {"1": 0.5, "0": 0.5, "-": 0.5}])
async def test_a_judge_that_reports_no_distribution_leaves_the_turn_unjudged(
    direct_bench: Bench, reported: dict[str, float] | None
) -> None:
    bench = direct_bench
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    bench.judge.direct = reported
    (result,) = await bench.judge_turn(session, second)
    assert result.outcome is TurnOutcome.UNJUDGED
    assert "log-probs" in result.why
    assert bench.rows("SELECT * FROM votes") == []


async def test_a_question_too_long_is_asked_shorter(direct_bench: Bench) -> None:
    bench = direct_bench
    first, second = bench.conversation("one", "long " * 20_000)
    session = await bench.insert(first, second)
    bench.judge.max_characters = 5_000
    (result,) = await bench.judge_turn(session, second)
    assert result.sample
    assert len(bench.judge.requests) > 1


async def test_after_giving_up_no_direct_vote_is_asked_for(direct_bench: Bench) -> None:
    bench = direct_bench
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    (result,) = await bench.judge_turn(session, second, give_up="the judge was away")
    assert (result.outcome, result.why) == (TurnOutcome.UNJUDGED, "no direct vote (the judge was away)")
    assert bench.judge.requests == []
