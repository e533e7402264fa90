"""Samples of judged turns: who may be trained, with which reward."""

from __future__ import annotations

import math
from dataclasses import replace
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from clawloop.core.contracts.turns import TurnOutcome, TurnStatus
from clawloop.core.errors import EngineAnswerUnusable
from clawloop.core.ids import TurnId, new_turn_id
from clawloop.core.judging.hints import NOT_ASKED, HintChoice, PromptChange
from clawloop.core.judging.records import FinalizedJudgement, Relation, TurnDecision
from clawloop.core.judging.voting import Verdict, Vote, majority, rated
from clawloop.core.recipes.recipe import Signal
from clawloop.core.samples.decision import (
    JudgedTurn,
    at_least_one,
    decide,
    unseen_parts,
    why_not_trainable,
    without_content,
)
from clawloop.core.samples.rewards import (
    CastVote,
    Member,
    decide_by_outcome,
    decide_group,
    relation_of,
    reward_votes,
    shape_reward,
    with_reward,
)

# The outcome of a judged turn.

GOOD, BAD, ZERO, TIE, MISSING = (
    majority([1, 1, -1]),
    majority([-1, -1, -1]),
    majority([0, 0, 1]),
    majority([1, -1]),
    majority([None]),
)
BINARY, OPD, COMBINED = Signal(hints=False), Signal(verdicts=False, at_least_one=False), Signal()
HINT = HintChoice(("Use Python.",), answered=True, why="the judge gave a usable hint in 1 of 1 answers")
NO_HINT = HintChoice((), answered=True, why="the judge found no hint")
NO_ANSWER = HintChoice((), answered=False, why="no valid hint answer")
SAMPLED, UNDECIDED, UNJUDGED = TurnOutcome.SAMPLED, TurnOutcome.UNDECIDED, TurnOutcome.UNJUDGED


@pytest.mark.parametrize(
    ("signal", "verdict", "hint", "reward", "has_hint", "outcome"),
    [
        # Combined: both terms, one of them, or none.
        (COMBINED, GOOD, HINT, 1.0, True, SAMPLED),
        (COMBINED, BAD, HINT, -1.0, True, SAMPLED),
        (COMBINED, ZERO, HINT, None, True, SAMPLED),
        (COMBINED, MISSING, HINT, None, True, SAMPLED),
        (COMBINED, GOOD, NO_HINT, 1.0, False, SAMPLED),
        (COMBINED, BAD, NO_ANSWER, -1.0, False, SAMPLED),
        (COMBINED, ZERO, NO_HINT, None, False, UNDECIDED),
        (COMBINED, TIE, NO_ANSWER, None, False, UNDECIDED),
        (COMBINED, MISSING, NO_HINT, None, False, UNJUDGED),
        # Binary: hints do not matter.
        (BINARY, BAD, HINT, -1.0, False, SAMPLED),
        (BINARY, GOOD, NOT_ASKED, 1.0, False, SAMPLED),
        (BINARY, ZERO, HINT, None, False, UNDECIDED),
        (BINARY, MISSING, HINT, None, False, UNJUDGED),
        # OPD: verdicts do not matter.
        (OPD, GOOD, HINT, None, True, SAMPLED),
        (OPD, MISSING, HINT, None, True, SAMPLED),
        (OPD, BAD, NO_HINT, None, False, UNDECIDED),
        (OPD, BAD, NO_ANSWER, None, False, UNJUDGED),
    ],
)
def test_the_decision_table(
    signal: Signal,
    verdict: Verdict,
    hint: HintChoice,
    reward: float | None,
    has_hint: bool,
    outcome: TurnOutcome,
) -> None:
    decision = decide(signal, verdict, hint, None)
    assert (decision.reward, decision.hints, decision.outcome) == (
        reward,
        ("Use Python.",) if has_hint else (),
        outcome,
    )


@pytest.mark.parametrize(
    ("signal", "verdict", "hint", "why"),
    [
        (COMBINED, BAD, HINT, "verdict bad: 3 of 3 votes bad; hint: the judge gave a usable hint in 1 of 1 answers"),
        (COMBINED, TIE, NO_HINT, "verdict neutral: vote tie; no hint: the judge found no hint"),
        (BINARY, MISSING, HINT, "no valid vote"),
        (OPD, GOOD, NO_ANSWER, "no hint: no valid hint answer"),
    ],
)
def test_a_decision_has_a_reason(signal: Signal, verdict: Verdict, hint: HintChoice, why: str) -> None:
    assert decide(signal, verdict, hint, None).why == why


def test_a_turn_that_cannot_be_trained_is_judged_and_shown_but_not_sampled() -> None:
    assert decide(BINARY, GOOD, NOT_ASKED, "not trainable: top_p") == TurnDecision(
        TurnOutcome.NOT_TRAINABLE, "not trainable: top_p (verdict good: 2 of 3 votes good)"
    )


def test_a_turn_without_a_verdict_stays_unjudged_even_if_it_could_not_be_trained() -> None:
    assert decide(BINARY, MISSING, NOT_ASKED, "not trainable: top_p").outcome is UNJUDGED


def test_a_rating_is_trained_with_its_exact_score() -> None:
    assert decide(COMBINED, rated(-0.5), NO_HINT, None).reward == -0.5
    assert decide(COMBINED, rated(0.0), NO_HINT, None).outcome is UNDECIDED


@given(
    st.sampled_from([BINARY, OPD, COMBINED]),
    st.lists(st.sampled_from([-1, 0, 1, None]), max_size=5),
    st.sampled_from([HINT, NO_HINT, NO_ANSWER]),
    st.sampled_from([None, "not trainable: top_p"]),
)
def test_sampled_means_that_there_is_a_gradient(
    signal: Signal, votes: list[int | None], hint: HintChoice, fault: str | None
) -> None:
    decision = decide(signal, majority(votes), hint, fault)  # type: ignore[arg-type]
    assert (decision.outcome is SAMPLED) == (decision.reward is not None or bool(decision.hints))
    assert decision.reward != 0
    assert decision.why


#

PLAIN: dict[str, JsonValue] = {"temperature": 0.6, "top_p": 1.0, "top_k": -1}
STRICT_TOOL: JsonValue = {"type": "function", "function": {"name": "f", "strict": True}}
TOOL: JsonValue = {"type": "function", "function": {"name": "f", "strict": False}}


def why(
    changes: dict[str, JsonValue] | None = None,
    *,
    without: str = "",
    status: TurnStatus = TurnStatus.COMPLETE,
    tools: list[JsonValue] | None = None,
    prompt_ids: list[int] | None = None,
    unknown: str = "",
    logprobs: tuple[float, ...] = (-0.1, -0.2),
    reply: dict[str, JsonValue] | None = None,
) -> str | None:
    sampling = {name: value for name, value in (PLAIN | (changes or {})).items() if name != without}
    return why_not_trainable(
        status=status,
        sampling=sampling,
        tools=tools,
        prompt_ids=None if unknown == "prompt_ids" else prompt_ids or [1, 2, 3],
        response_ids=None if unknown == "response_ids" else [4, 5],
        logprobs=None if unknown == "logprobs" else logprobs,
        unseen=(),
        reply=reply,
    )


def test_a_turn_sampled_at_a_temperature_alone_can_be_trained() -> None:
    assert why() is None


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1},
        {"temperature": 2.0},
        {"top_k": 0},
        {"min_p": 0.0},
        {"min_p": None},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
        {"logit_bias": {}, "bad_words": [], "min_tokens": 0, "allowed_token_ids": None},
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"use_beam_search": False, "watermarking": None},
        {
            "seed": 1,
            "stop": ["END"],
            "max_tokens": 5,
            "n": 4,
            "user": "u",
            "logprobs": True,
            "top_logprobs": 5,
        },
    ],
)
def test_neutral_values_and_unrelated_settings_leave_a_turn_trainable(
    changes: dict[str, JsonValue],
) -> None:
    assert why(changes) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"temperature": 0}, "temperature 0"),
        ({"temperature": 0.0}, "temperature 0"),
        ({"temperature": 0.001}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": None}, "temperature unknown"),
        ({"temperature": "0.6"}, "temperature unknown"),
        ({"top_p": 0.95}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_p": None}, "top_p unknown"),
        ({"top_k": 20}, "top_k"),
        ({"top_k": True}, "top_k unknown"),
        ({"min_p": 0.05}, "min_p"),
        ({"min_p": "x"}, "min_p"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"presence_penalty": -0.1}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"guided_json": {"type": "object"}}, "guided decoding"),
        ({"guided_regex": "a+", "guided_choice": ["a"]}, "guided decoding"),
        ({"guided_my secret": True}, "guided decoding"),  # a client's own word has no place in a reason
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"thinking_token_budget": 100}, "thinking_token_budget"),
        ({"watermarking": True}, "watermarking"),
    ],
)
def test_settings_that_change_the_distribution_are_named(changes: dict[str, JsonValue], reason: str) -> None:
    assert why(changes) == f"not trainable: {reason}"


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k"])
def test_a_field_the_gateway_always_fills_in_is_unknown_when_missing(field: str) -> None:
    assert why(without=field) == f"not trainable: {field} unknown"


def test_every_reason_is_named() -> None:
    assert why({"top_p": 0.9, "top_k": 20, "min_p": 0.1}) == "not trainable: top_p, top_k, min_p"


def test_a_strict_tool_constrains_the_reply_unless_no_tool_may_be_called() -> None:
    assert why(tools=[TOOL]) is None
    assert why(tools=[TOOL, STRICT_TOOL]) == "not trainable: strict tool"
    assert why({"tool_choice": "auto"}, tools=[STRICT_TOOL]) == "not trainable: strict tool"
    assert why({"tool_choice": "none"}, tools=[STRICT_TOOL]) is None


def test_one_call_at_most_constrains_the_reply_of_a_request_with_tools() -> None:
    """vLLM then writes the calls by a grammar."""
    assert why({"parallel_tool_calls": False}, tools=[TOOL]) == "not trainable: parallel_tool_calls"
    assert why({"parallel_tool_calls": False, "tool_choice": "auto"}, tools=[TOOL]) is not None
    for neutral in (True, None):
        assert why({"parallel_tool_calls": neutral}, tools=[TOOL]) is None
    assert why({"parallel_tool_calls": False, "tool_choice": "none"}, tools=[TOOL]) is None
    assert why({"parallel_tool_calls": False}) is None
    assert why(tools=["nonsense", {"function": 3}]) is None


def test_a_reply_cut_by_length_is_trained_as_cut_but_a_broken_one_is_not() -> None:
    assert why(status=TurnStatus.LENGTH) is None
    assert why(status=TurnStatus.ABORTED) == "not trainable: reply aborted"
    assert why(status=TurnStatus.ERROR) == "not trainable: reply error"


@pytest.mark.parametrize(
    ("unknown", "reason"),
    [
        ("prompt_ids", "prompt ids unknown"),
        ("response_ids", "response ids unknown"),
        ("logprobs", "log-probs unknown"),
    ],
)
def test_values_the_engine_did_not_report_are_not_invented(unknown: str, reason: str) -> None:
    assert why(unknown=unknown) == f"not trainable: {reason}"


def test_an_empty_reply_cannot_be_trained() -> None:
    reason = why_not_trainable(
        status=TurnStatus.COMPLETE, sampling=PLAIN, tools=None, prompt_ids=[1], response_ids=[], logprobs=[], unseen=()
    )
    assert reason == "not trainable: empty reply"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"content": "Yes."}, None),
        ({"content": ""}, "empty reply"),
        ({"content": None}, "empty reply"),
        ({"content": " \n\t "}, "empty reply"),
        ({"content": [{"type": "text", "text": " "}]}, "empty reply"),
        ({"content": "!" * 20}, "reply of one character"),
        ({"content": "! " * 300}, "reply of one character"),
        ({"content": "no" + "o" * 200 + "!"}, "reply of one character"),
        ({"content": "<think>so</think>\n."}, "reply of one character"),
        ({"content": "4"}, None),
        ({"content": "11111111"}, None),
        ({"content": "-----\n| a | b |\n-----"}, None),
        ({"content": "<think>\nI wonder, "}, "thinking without an end"),
        ({"content": "<think>so</think>"}, "thinking without an end"),
        ({"content": "<think>so</think>\nYes."}, None),
        ({"content": None, "reasoning_content": "I wonder"}, "thinking without an end"),
        ({"content": "Yes.", "reasoning_content": "so"}, None),
        ({"content": None, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}, None),
        ({"content": None, "refusal": "I will not."}, None),
    ],
)
def test_a_reply_without_content_is_named_for_what_it_is(reply: dict[str, JsonValue], reason: str | None) -> None:
    assert without_content({"role": "assistant", **reply}, 40) == reason
    assert why(reply=reply) == (None if reason is None else f"not trainable: {reason}")


def test_of_a_stream_with_a_tenth_of_garbage_exactly_the_garbage_is_left_out() -> None:
    garbage = ["!" * 64, "", "<think>and then", "\n" * 30, "."]
    stream = [garbage[place // 10 % 5] if place % 10 == 0 else f"Answer {place} is long." for place in range(200)]
    left_out = [text for text in stream if why(reply={"role": "assistant", "content": text}) is not None]
    assert left_out == garbage * 4


def test_a_reply_of_one_token_is_not_trained_and_a_judges_vote_of_one_is() -> None:
    assert without_content({"role": "assistant", "content": "Yes"}, 1) == "reply of one token"
    assert without_content({"role": "assistant", "content": "Yes"}, 2) is None
    assert without_content({"role": "assistant", "content": "", "tool_calls": [{}]}, 1) is None
    assert why() is None


@pytest.mark.parametrize("bad", [math.nan, -math.inf, -9999.0])
def test_log_probs_that_are_no_numbers_are_not_trained(bad: float) -> None:
    assert why(logprobs=(-0.1, bad)) == "not trainable: log-probs not finite"


def test_log_probs_of_another_length_raise() -> None:
    with pytest.raises(EngineAnswerUnusable, match="3 log-probs for 2 response ids"):
        why(logprobs=(-0.1, -0.2, -0.3))


@given(
    st.dictionaries(
        st.sampled_from(["top_p", "min_p", "tool_choice", "temperature", "logit_bias"]),
        st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    )
)
def test_values_of_any_shape_are_judged(changes: dict[str, JsonValue]) -> None:
    reason = why(changes)
    assert reason is None or reason.startswith("not trainable: ")


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "image"),
        ({"type": "input_image", "image_url": "x"}, "image"),
        ({"image_url": {"url": "x"}}, "image"),
        ({"type": "image_embeds", "image_embeds": "x"}, "image"),
        ({"type": "input_audio", "input_audio": {}}, "audio"),
        ({"type": "video_url", "video_url": {}}, "video"),
        ({"type": "file", "file": {}}, "file"),
        ({"type": "secret words"}, "other content"),
        ({"type": {}}, "other content"),
    ],
)
def test_a_prompt_with_what_the_trainer_cannot_see_is_not_trained(part: JsonValue, kind: str) -> None:
    text: JsonValue = {"type": "text", "text": "What is this?"}
    messages: list[dict[str, JsonValue]] = [
        {"role": "user", "content": [text, part, part]},
        {"role": "user", "content": "image_url"},
        {"role": "tool", "content": [part]},
    ]
    assert unseen_parts(messages) == [kind]
    reason = why_not_trainable(
        status=TurnStatus.COMPLETE,
        sampling=PLAIN,
        tools=None,
        prompt_ids=[1],
        response_ids=[2],
        logprobs=[-0.1],
        unseen=unseen_parts(messages),
    )
    assert reason == f"not trainable: {kind} in the prompt"


@pytest.mark.parametrize(
    "content",
    [
        "image",
        None,
        [],
        ["image"],
        [{"type": "text", "text": "image_url"}],
        [{"type": "thinking", "thinking": "image"}],
    ],
)
def test_a_prompt_of_text_is_trained(content: JsonValue) -> None:
    assert unseen_parts([{"role": "user", "content": content}, {"role": "assistant"}]) == []


# The sample of a session that would close without one.


def turn(number: int) -> TurnId:
    return TurnId(UUID(int=number))


def judged(number: int, expected: float | None, trainable: bool = True, sampled: bool = False) -> JudgedTurn:
    return JudgedTurn(turn(number), expected, trainable, sampled)


def test_the_turn_with_the_largest_expected_score_is_sampled_with_that_score() -> None:
    found = at_least_one([judged(1, 0.2), judged(2, -1 / 3), judged(3, 1 / 3), judged(4, None)])
    assert (found.turn_id, found.reward, found.ask) == (turn(2), -1 / 3, ())
    assert found.why == "the only sample of its session: mean vote -0.33"


def test_a_session_with_a_sample_needs_no_other() -> None:
    found = at_least_one([judged(1, 0.2), judged(2, 1.0, sampled=True)])
    assert (found.turn_id, found.why) == (None, "has a sample")


def test_where_all_votes_cancel_out_a_direct_vote_is_asked_for_every_turn_that_counts() -> None:
    turns = [judged(1, 0.0), judged(2, None), judged(3, 0.0, trainable=False), judged(4, 0.0)]
    found = at_least_one(turns)
    assert (found.turn_id, found.ask) == (None, (turn(1), turn(4)))


def test_after_direct_votes_the_largest_counts_and_nothing_is_asked_again() -> None:
    assert at_least_one([judged(1, 0.02), judged(4, -0.4)], direct=True).turn_id == turn(4)
    for scores in ((0.0, 0.0), (0.02, -0.049)):
        found = at_least_one([judged(at, score) for at, score in enumerate(scores)], direct=True)
        assert (found.turn_id, found.ask) == (None, ())
        assert found.why.startswith("no sample: the largest mean vote is")


def test_a_score_below_the_bound_gives_no_sample() -> None:
    assert at_least_one([judged(1, 0.049)]).turn_id is None
    assert at_least_one([judged(1, 0.05)]).turn_id == turn(1)


@pytest.mark.parametrize("turns", [[], [judged(1, None)], [judged(1, 0.9, trainable=False)]])
def test_without_a_judged_turn_that_can_be_trained_there_is_a_reason(turns: list[JudgedTurn]) -> None:
    found = at_least_one(turns)
    assert (found.turn_id, found.ask, found.why) == (
        None,
        (),
        "no sample: no judged turn that can be trained",
    )


@given(st.lists(st.tuples(st.none() | st.floats(-1, 1), st.booleans(), st.booleans()), max_size=6), st.booleans())
def test_the_rule_never_gives_a_sample_without_gradient(
    turns: list[tuple[float | None, bool, bool]], direct: bool
) -> None:
    found = at_least_one([judged(at, *each) for at, each in enumerate(turns)], direct=direct)
    assert (found.turn_id is None) == (found.reward is None)
    assert found.reward is None or math.fabs(found.reward) >= 0.05
    assert not (found.turn_id and found.ask)


# Rewards of a judge's votes: the example of RLAnything, and what is compared with what.


def cast(votes: list[Vote], *, succeeded: bool, weight: float = 1.0, why: str | None = None) -> list[CastVote]:
    """The votes on one turn."""
    mean = sum(votes) / len(votes)
    return [CastVote(TurnId(uuid4()), vote, mean, succeeded, weight, why) for vote in votes]


def test_a_vote_that_agrees_with_the_turns_reward_is_rewarded_and_one_that_does_not_is_punished() -> None:
    rewarded = reward_votes(cast([1, 1, -1], succeeded=True))
    assert [each.reward for each in rewarded] == pytest.approx([4 / 3, 4 / 3, -4 / 3])
    assert [each.advantage for each in rewarded] == pytest.approx([0.5**0.5, 0.5**0.5, -(2**0.5)])
    assert {each.outcome for each in rewarded} == {TurnOutcome.SAMPLED}
    why = "vote -1, mean +0.33, episode a success: consistency -1.33, advantage -1.41 among 3 votes"
    assert rewarded[2].why == why


def test_praise_of_a_failed_episode_is_worth_less_than_blame() -> None:
    praised, blamed = reward_votes([*cast([1], succeeded=False), *cast([-1], succeeded=False)])
    assert (praised.reward, blamed.reward) == (0.0, 2.0)
    assert praised.advantage is not None
    assert blamed.advantage is not None
    assert praised.advantage < 0 < blamed.advantage


@pytest.mark.parametrize("votes", [[], cast([1], succeeded=True), cast([1, 1], succeeded=True)])
def test_votes_of_the_same_worth_teach_nothing(votes: list[CastVote]) -> None:
    assert [each.outcome for each in reward_votes(votes)] == [TurnOutcome.UNDECIDED] * len(votes)
    assert all(each.advantage is None for each in reward_votes(votes))


def test_the_weight_of_votes_is_the_judged_policys() -> None:
    assert [each.reward for each in reward_votes(cast([1, -1, -1], succeeded=True, weight=0.0))] == [1, -1, -1]


def test_a_vote_that_cannot_be_trained_says_why_and_is_compared_all_the_same() -> None:
    (good, bad) = reward_votes([*cast([1], succeeded=True), *cast([1], succeeded=False, why="not trainable: top_p")])
    assert (bad.outcome, bad.why, bad.advantage) == (TurnOutcome.NOT_TRAINABLE, "not trainable: top_p", None)
    assert good.advantage == pytest.approx(1.0)


# What a turn is worth: length, the mean verdict, and the other responses to its prompt.

OVERLONG = Signal.model_validate({"overlong": {"limit_tokens": 1000, "cache_tokens": 200}})
PRAISED, EVEN = majority([1, 1, 1]), majority([1, -1, 0])
JUDGEMENT = FinalizedJudgement(PRAISED, NOT_ASKED, None, 1.0, (), TurnOutcome.SAMPLED, "verdict +1", Relation.MEAN)


@pytest.mark.parametrize(("tokens", "cut", "reward"), [(700, False, 1.0), (900, False, 0.5), (1100, False, 0.0)])
def test_the_length_penalty_is_that_of_the_article(tokens: int, cut: bool, reward: float) -> None:
    found = shape_reward(OVERLONG, PRAISED, Relation.NONE, tokens=tokens, cut_by_length=cut)
    assert found.reward == pytest.approx(reward)
    assert (found.verdict, found.expected) == (1, 1.0)


@pytest.mark.parametrize(("weight", "outcome", "reward"), [(1.0, 1, 4 / 3), (0.5, 1, 7 / 6), (2.0, -1, -1 / 3)])
def test_votes_are_weighted_against_an_outcome_by_the_recipe(weight: float, outcome: int, reward: float) -> None:
    votes: list[Vote | None] = [1, 1, -1]
    signal = Signal(reward="outcome_process", process_weight=weight, hints=False)
    found = shape_reward(signal, majority(votes), Relation.OUTCOME, tokens=3, cut_by_length=False)
    turn = Member(new_turn_id(), found.reward, None, found.why, taken=False)
    (decision,) = decide_by_outcome([turn], outcome).values()
    assert decision.reward == pytest.approx(reward)


@pytest.mark.parametrize(("outcome", "judge"), [(1, "+0.44"), (-1, "-0.22")])
def test_the_reason_names_what_the_votes_earned_the_judge(outcome: int, judge: str) -> None:
    """R·S of each vote on average: 4/3 · (1 + 1 − 1)/3, and −2/3 · 1/3."""
    turn = Member(new_turn_id(), 1 / 3, None, "2 of 3 votes good", taken=False, mean_vote=1 / 3)
    (decision,) = decide_by_outcome([turn], outcome).values()
    assert decision.why == f"outcome {outcome:+d}, process +0.33, judge {judge} (2 of 3 votes good)"
    (alone,) = decide_by_outcome([turn], None).values()
    assert alone.why == "process +0.33, no outcome (2 of 3 votes good)"


def test_a_reply_cut_by_length_gets_the_full_penalty_and_the_reason_names_it() -> None:
    found = shape_reward(OVERLONG, majority([-1]), Relation.NONE, tokens=3, cut_by_length=True)
    assert (found.reward, found.why) == (-2.0, "1 of 1 votes bad, length -1.00")


def test_length_alone_is_no_verdict_but_counts_in_a_group() -> None:
    assert shape_reward(OVERLONG, EVEN, Relation.NONE, tokens=1100, cut_by_length=False) == EVEN
    assert shape_reward(OVERLONG, EVEN, Relation.GROUP, tokens=1100, cut_by_length=False).reward == -1.0
    missing = majority([None])
    assert shape_reward(OVERLONG, missing, Relation.GROUP, tokens=1100, cut_by_length=False) == missing


def test_the_relation_of_rewards_by_recipe() -> None:
    group = Signal.model_validate({"reward": "group", "hints": False})
    assert relation_of(group, grouped=True) is Relation.GROUP
    assert relation_of(group, grouped=False) is Relation.NONE
    assert relation_of(Signal(baseline="mean"), grouped=True) is Relation.MEAN
    assert relation_of(Signal(), grouped=True) is Relation.NONE


def test_a_reward_of_0_leaves_no_term() -> None:
    gone = with_reward(JUDGEMENT, 0.0, "mean before +1.00")
    assert (gone.reward, gone.outcome, gone.why) == (None, TurnOutcome.UNDECIDED, "verdict +1; mean before +1.00")
    less = with_reward(JUDGEMENT, 0.25, "mean before +0.75")
    assert (less.reward, less.outcome) == (0.25, TurnOutcome.SAMPLED)


def test_a_reward_of_0_leaves_the_hint() -> None:
    hint = HintChoice(("Use Python.",), answered=True, why="1 of 1")
    hinted = replace(JUDGEMENT, hint=hint, hinted_prompts=(PromptChange(0, 0, (1, 2)),))
    left = with_reward(hinted, 0.0, "mean before +1.00")
    assert (left.reward, left.hinted_prompts, left.outcome) == (None, hinted.hinted_prompts, TurnOutcome.SAMPLED)


def members(*rewards: float | None, taken: frozenset[int] = frozenset()) -> list[Member]:
    return [Member(new_turn_id(), reward, None, f"r {reward}", n in taken) for n, reward in enumerate(rewards)]


def test_a_complete_group_gives_the_articles_advantages() -> None:
    group = members(1.0, -1.0, 1.0, 0.0)
    decisions = decide_group(group, session_closed=False)
    assert list(decisions) == [member.turn_id for member in group]
    assert [round(decision.reward or 0, 2) for decision in decisions.values()] == [0.90, -1.51, 0.90, -0.30]
    assert {decision.outcome for decision in decisions.values()} == {TurnOutcome.SAMPLED}
    assert decisions[group[1].turn_id].why == "-1.51 in its group of 4 (r -1.0)"


def test_a_group_waits_until_its_session_closes() -> None:
    group = members(1.0, None, -1.0)
    assert decide_group(group, session_closed=False) == {
        group[n].turn_id: TurnDecision(
            TurnOutcome.UNDECIDED, f"waits for its group: 2 of 3 have a verdict (r {group[n].reward})"
        )
        for n in (0, 2)
    }
    assert [decision.reward for decision in decide_group(group, session_closed=True).values()] == [1.0, -1.0]


def test_a_group_that_agrees_gets_no_sample() -> None:
    (one, other) = decide_group(members(-1.0, -1.0), session_closed=False).values()
    assert (one.reward, one.outcome, one.why) == (None, TurnOutcome.UNDECIDED, "group agrees (r -1.0)")
    assert other.outcome is TurnOutcome.UNDECIDED


@pytest.mark.parametrize(("reward", "outcome"), [(-1.0, TurnOutcome.SAMPLED), (0.0, TurnOutcome.UNDECIDED)])
def test_a_lone_verdict_counts_as_it_is(reward: float, outcome: TurnOutcome) -> None:
    (decision,) = decide_group(members(None, reward, None), session_closed=True).values()
    assert (decision.reward, decision.outcome) == (reward or None, outcome)


def test_a_taken_member_stays_and_an_untrainable_one_counts_for_the_others() -> None:
    group = members(1.0, -1.0, 1.0, 0.0, taken=frozenset({0}))
    group[1] = Member(group[1].turn_id, -1.0, "not trainable: top_p", "r -1.0", False)
    decisions = decide_group(group, session_closed=False)
    assert group[0].turn_id not in decisions
    untrainable = decisions[group[1].turn_id]
    assert (untrainable.outcome, untrainable.reward) == (TurnOutcome.NOT_TRAINABLE, None)
    assert round(decisions[group[2].turn_id].reward or 0, 2) == 0.90
