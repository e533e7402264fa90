"""From a verdict and a hint to a training sample, or to the reason why there is none.

Knows nothing about torch, losses or Postgres: a sample says which terms its advantage has (a reward, a
teacher), the trainer computes them. Terms that are absent are None, never 0: a sample without a hint has no
teacher term at all, and one with verdict 0 has no reward term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.contracts.turns import TurnOutcome
from clawloop.errors import EngineAnswerUnusable
from clawloop.ids import TurnId
from clawloop.judging.hints import HintChoice
from clawloop.judging.voting import Verdict, signed
from clawloop.recipes.recipe import Signal

SMALLEST_EXPECTED = 0.05  # an expected score nearer to 0 says too little to make a sample of


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a judged turn.

    Args:
        reward: the reward term; None if there is none.
        hint: the hint for the teacher term; None if there is none.
        outcome: SAMPLED exactly when there is a term.
        why: one line for people.
    """

    reward: float | None
    hint: str | None
    outcome: TurnOutcome
    why: str


@dataclass(frozen=True, slots=True)
class Sample:
    """A judged turn made trainable.

    Args:
        prompt_ids, response_ids, logprobs: the engine's own; log-probs of the response ids at `temperature`.
        temperature: the recorded one, by which the trainer divides its logits.
        version: the adapter version that answered.
        reward: None if there is no reward term.
        hinted_prompt_ids: the prompt with the hint, for the teacher; None if there is no teacher term.
    """

    turn_id: TurnId
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float
    version: int
    reward: float | None
    hinted_prompt_ids: tuple[int, ...] | None

    def __post_init__(self) -> None:
        if len(self.response_ids) != len(self.logprobs):
            raise EngineAnswerUnusable(
                f"turn {self.turn_id}: {len(self.logprobs)} log-probs for {len(self.response_ids)} ids"
            )
        if not self.prompt_ids or not self.response_ids:
            raise EngineAnswerUnusable(f"turn {self.turn_id}: a sample needs a prompt and a response")
        if not self.reward and not self.hinted_prompt_ids:
            raise ValueError(f"turn {self.turn_id}: a sample needs a reward other than 0 or a hinted prompt")


def decide(signal: Signal, verdict: Verdict, hint: HintChoice, not_trainable: str | None) -> Decision:
    """The decision table of DESIGN section 7 for a turn that was judged.

    Args:
        signal: whether verdicts and hints are learned from.
        not_trainable: the reason `why_not_trainable` gave; such a turn is judged and shown, but not sampled.
    """
    reward = (verdict.reward or None) if signal.verdicts else None
    text = hint.text if signal.hints else None
    why = _why(signal, verdict, hint)
    if reward is None and text is None:
        unknown = verdict.verdict is None if signal.verdicts else not hint.answered
        return Decision(None, None, TurnOutcome.UNJUDGED if unknown else TurnOutcome.UNDECIDED, why)
    if not_trainable is not None:
        return Decision(None, None, TurnOutcome.NOT_TRAINABLE, f"{not_trainable} ({why})")
    return Decision(reward, text, TurnOutcome.SAMPLED, why)


def assemble(
    decision: Decision,
    *,
    turn_id: TurnId,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    logprobs: Sequence[float],
    temperature: float,
    version: int,
    hinted_prompt_ids: Sequence[int] | None,
) -> Sample:
    """The sample of a turn that is to be sampled.

    Raises:
        ValueError: the decision is not to sample, or it has a hint and the hinted prompt is missing, or the
            other way round.
        EngineAnswerUnusable: ids and log-probs do not belong together.
    """
    if decision.outcome is not TurnOutcome.SAMPLED:
        raise ValueError(f"turn {turn_id} is {decision.outcome.value}, not sampled")
    if (decision.hint is None) != (hinted_prompt_ids is None):
        raise ValueError(f"turn {turn_id}: hint and hinted prompt must both be there or both be missing")
    return Sample(
        turn_id=turn_id,
        prompt_ids=tuple(prompt_ids),
        response_ids=tuple(response_ids),
        logprobs=tuple(logprobs),
        temperature=temperature,
        version=version,
        reward=decision.reward,
        hinted_prompt_ids=None if hinted_prompt_ids is None else tuple(hinted_prompt_ids),
    )


@dataclass(frozen=True, slots=True)
class JudgedTurn:
    """A main turn of a closing session, as the at-least-one rule sees it.

    Args:
        expected: its expected score; None if it has no valid vote.
        trainable: it could be trained.
        sampled: it has an effective sample already, in whatever state.
    """

    turn_id: TurnId
    expected: float | None
    trainable: bool
    sampled: bool


@dataclass(frozen=True, slots=True)
class FallbackSample:
    """What the at-least-one rule says at a session's first close.

    Args:
        turn_id, reward: the turn to sample and its reward; None if there is none.
        ask: turns to ask a direct vote for; then apply the rule again with `direct=True`.
        why: for the session.
    """

    turn_id: TurnId | None
    reward: float | None
    ask: tuple[TurnId, ...]
    why: str


def at_least_one(turns: Sequence[JudgedTurn], *, direct: bool = False) -> FallbackSample:
    """The judged turn with the largest |expected score|, the first of equals, unless one is sampled already.

    Args:
        direct: the expected scores come from direct votes, so none is asked for any more.
    """
    if any(turn.sampled for turn in turns):
        return FallbackSample(None, None, (), "has a sample")
    known = [
        (abs(turn.expected), turn.expected, turn.turn_id)
        for turn in turns
        if turn.trainable and turn.expected is not None
    ]
    if not known:
        return FallbackSample(None, None, (), "no sample: no judged turn that can be trained")
    size, score, turn_id = max(known, key=lambda candidate: candidate[0])
    if size == 0 and not direct:
        asked = tuple(candidate for _, _, candidate in known)
        return FallbackSample(None, None, asked, "votes cancel out: direct vote asked for")
    if size < SMALLEST_EXPECTED:
        return FallbackSample(None, None, (), f"no sample: largest expected score is {score:+.2f}")
    return FallbackSample(turn_id, score, (), f"at least one: expected score {score:+.2f}")


def _why(signal: Signal, verdict: Verdict, hint: HintChoice) -> str:
    of_verdict = verdict.why if verdict.verdict is None else f"verdict {signed(verdict.verdict)}: {verdict.why}"
    of_hint = f"no hint: {hint.why}" if hint.text is None else f"hint: {hint.why}"
    return "; ".join([of_verdict] * signal.verdicts + [of_hint] * signal.hints)
