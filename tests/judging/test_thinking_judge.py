"""A judge on our engines thinks before it answers if its model can, for a bounded number of tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal

import pytest

from clawloop.app.processes.workers import judge_client
from clawloop.core.contracts.serving import Directory
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import JudgeUnavailable
from clawloop.core.families.template import Thinking
from clawloop.core.ids import new_turn_id
from clawloop.core.judging.evidence import Evidence, Statement
from clawloop.core.judging.prompts import AnswerForm, vote_prompt
from clawloop.core.recipes.recipe import Recipe
from clawloop.core.settings import Settings
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import FREE_TOKENS, THINKING_TOKENS
from clawloop.serving.rendering import ThinkingProbe
from tests.fakes.judge import FakeJudge
from tests.judging.conftest import JUDGE_SECONDS, Bench, set_recipe, with_client, with_signal

PLAIN = ("<|im_start|>assistant\n",) * 2
HYBRID = ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_start|>assistant\n")
ALWAYS = ("<|im_start|>assistant\n<think>\n",) * 2
COMBINED = Recipe(name="combined")


@pytest.fixture
async def asking(bench: Bench) -> AsyncIterator[Bench]:
    """The judge is asked how its model thinks."""
    async with with_client(bench, None, JUDGE_SECONDS) as asking:
        yield asking


async def judged(bench: Bench) -> str:
    """Judges one turn; returns why its outcome is what it is."""
    first, second = bench.conversation("one", "No, wrong.")
    (result,) = await bench.judge_turn(await bench.insert(first, second), second)
    return result.why


@pytest.mark.parametrize("rendered", [HYBRID, ALWAYS])
async def test_a_model_that_can_think_thinks_before_votes_and_hints(asking: Bench, rendered: tuple[str, str]) -> None:
    asking.judge.rendered, asking.judge.votes, asking.judge.hint = rendered, [-1], "Say it in fewer words, always."
    assert (await judged(asking)).startswith("verdict bad: 3 of 3 votes")
    votes, hints = asking.judge.asked("vote"), asking.judge.asked("hint")
    assert (len(votes), len(hints)) == (1, 1)
    for request in (*votes, *hints):
        assert (request["n"], request["max_tokens"]) == (3, FREE_TOKENS)
        assert request["thinking_token_budget"] == THINKING_TOKENS < FREE_TOKENS
        assert request["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
        assert "structured_outputs" not in request
        assert "You may think first." in request["messages"][-1]["content"]


@pytest.mark.parametrize("rendered", [PLAIN, None])
async def test_a_model_that_cannot_answers_by_grammar(asking: Bench, rendered: tuple[str, str] | None) -> None:
    asking.judge.rendered = rendered
    await set_recipe(asking, with_signal())
    await judged(asking)
    (request,) = asking.judge.requests
    assert "structured_outputs" in request
    assert "thinking_token_budget" not in request


async def test_an_engine_is_asked_once_how_its_model_thinks(asking: Bench) -> None:
    asking.judge.rendered = HYBRID
    await judged(asking)
    first, second = asking.conversation("three", "four", session="other")
    await asking.judge_turn(await asking.insert(first, second), second)
    switches = [asked.get("chat_template_kwargs") for asked in asking.judge.tokenized if "return_token_strs" in asked]
    assert switches == [{"enable_thinking": on, "thinking": on} for on in (True, False)]


@pytest.mark.parametrize("status", [401, 403, 408, 429, 500])
async def test_an_engine_that_cannot_say_now_how_its_model_thinks_is_asked_later(judge: FakeJudge, status: int) -> None:
    endpoint = Endpoint(judge.url, "tiny")
    async with ThinkingProbe(lambda _: [endpoint]) as probe:
        judge.rendered, judge.refuses_to_render = HYBRID, (status, "not now: chat_template_kwargs")
        with pytest.raises(JudgeUnavailable, match=f"an engine answered {status} "):
            await probe.of("default")
        judge.refuses_to_render = None
        assert await probe.of("default") is Thinking.OPTIONAL


@pytest.mark.parametrize(
    ("refusal", "later"),
    [
        ((404, "Not Found"), Thinking.OPTIONAL),
        ((404, "no such thing as return_token_strs"), Thinking.OPTIONAL),
        ((400, "the model is being loaded"), Thinking.OPTIONAL),
        ((400, "Extra inputs are not permitted: return_token_strs"), Thinking.NEVER),
        ((422, "body.chat_template_kwargs: extra fields not permitted"), Thinking.NEVER),
    ],
)
async def test_a_server_that_does_not_render_chats_is_asked_again_unless_it_refuses_a_field(
    judge: FakeJudge, refusal: tuple[int, str], later: Thinking
) -> None:
    endpoint = Endpoint(judge.url, "tiny")
    async with ThinkingProbe(lambda _: [endpoint]) as probe:
        judge.rendered, judge.refuses_to_render = HYBRID, refusal
        assert await probe.of("default") is Thinking.NEVER
        judge.refuses_to_render = None
        assert await probe.of("default") is later


@pytest.mark.parametrize(("form", "constrained"), [("free", False), ("grammar", True)])
@pytest.mark.parametrize("rendered", [PLAIN, HYBRID, ALWAYS])
async def test_a_recipe_forces_a_form(asking: Bench, form: str, constrained: bool, rendered: tuple[str, str]) -> None:
    asking.judge.rendered = rendered
    await set_recipe(asking, with_signal(judge_form=form))
    await judged(asking)
    (request,) = asking.judge.requests
    assert ("structured_outputs" in request) == constrained
    # What always thinks has tokens for it before the grammar begins; what can be switched off is.
    assert ("thinking_token_budget" in request) == (rendered is ALWAYS or (rendered is HYBRID and not constrained))


async def test_thinking_that_does_not_end_is_a_missing_vote_with_a_reason(asking: Bench) -> None:
    await set_recipe(asking, with_signal())
    asking.judge.rendered, asking.judge.cut = HYBRID, 1000
    why = await judged(asking)
    assert why == "no valid vote (3 of 3 answers ended at the judge's limit of tokens)"
    assert [vote["score"] for vote in asking.rows("SELECT score FROM votes")] == [None] * 3
    assert asking.rows("SELECT outcome FROM turns WHERE outcome = %s", TurnOutcome.UNJUDGED)


async def test_an_answer_that_was_cut_is_asked_for_once_more(asking: Bench) -> None:
    await set_recipe(asking, with_signal())
    asking.judge.rendered, asking.judge.cut = HYBRID, 2
    assert await judged(asking) == "verdict good: 3 of 3 votes good"
    assert [request.get("n", 1) for request in asking.judge.requests] == [3, 2]


async def test_an_engine_that_refuses_a_thinking_budget_is_asked_without(asking: Bench) -> None:
    await set_recipe(asking, with_signal())
    asking.judge.rendered, asking.judge.takes_budget = HYBRID, False
    assert await judged(asking) == "verdict good: 3 of 3 votes good"
    assert ["thinking_token_budget" in request for request in asking.judge.requests] == [True, False]
    assert asking.judge.requests[-1]["n"] == 3


async def test_a_direct_vote_switches_thinking_off(asking: Bench) -> None:
    await set_recipe(asking, with_signal(votes="direct"))
    asking.judge.rendered = HYBRID
    assert (await judged(asking)).startswith("verdict good: direct vote")
    (request,) = asking.judge.requests
    assert request["chat_template_kwargs"]["enable_thinking"] is False


async def test_a_model_that_always_thinks_gives_no_direct_vote(asking: Bench) -> None:
    await set_recipe(asking, with_signal(votes="direct"))
    asking.judge.rendered = ALWAYS
    assert "the judge always thinks first" in await judged(asking)
    assert asking.judge.requests == []


async def test_without_an_engine_judging_is_retried(asking: Bench) -> None:
    first, second = asking.conversation("one", "two")
    session = await asking.insert(first, second)
    asking.judge.url = "http://127.0.0.1:1"
    with pytest.raises(JudgeUnavailable, match="no engine said whether its model thinks"):
        await asking.judge_turn(session, second)


@pytest.mark.parametrize(("form", "thinks"), [(None, False), ("free", False), ("auto", True)])
async def test_a_judge_elsewhere_is_asked_how_it_thinks_if_settings_say_that_it_is_an_engine(
    judge: FakeJudge, form: Literal["auto", "free"] | None, thinks: bool
) -> None:
    judge.rendered, judge.votes = HYBRID, [1]
    settings = Settings(judge_url=judge.url, judge_model="judge", judge_form=form)
    async with judge_client(settings, lambda: Directory((), ())) as client:
        assert await client.form("default", "auto") is AnswerForm.FREE
        asked = (Statement("user", "Hello"),)
        prompt = vote_prompt(new_turn_id(), Evidence((), asked[0], (), asked, asked, None))
        await client.answers("default", prompt, 3, 0.6)
    (request,) = judge.asked("vote")
    assert ("thinking_token_budget" in request) is thinks
