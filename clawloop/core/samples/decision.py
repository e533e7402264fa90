"""From a judged turn to a sample or the reason why there is none."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from pydantic import JsonValue

from clawloop.core.contracts.lessons import ShownLesson
from clawloop.core.contracts.turns import Message, TurnOutcome, TurnStatus
from clawloop.core.errors import EngineAnswerUnusable
from clawloop.core.gate.checks import is_of_one_character
from clawloop.core.ids import TurnId
from clawloop.core.judging.hints import HintChoice
from clawloop.core.judging.records import TurnDecision
from clawloop.core.judging.voting import Verdict, in_words
from clawloop.core.recipes.recipe import Recipe, Signal
from clawloop.core.turns.canonical import TEXT_PARTS
from clawloop.core.turns.files import kind_of_part
from clawloop.core.turns.thinking import THINKING_PARTS, without_leading_thinking

# Held-out conversations -----------------------------------------------------------------------------------------------
# Conversations held out of training, chosen by a hash, so that every process and every retry chooses the same.

_RANGE = 2**64


def is_held_out(policy: str, unit: UUID, share: float) -> bool:
    """True if the samples of a unit are held out.

    A higher share holds out the same units and more.

    Args:
        policy: each policy holds out other units.
        unit: the group of responses that belong together, or the session of a turn without a group: what is similar is
            held out as a whole.
        share: of all units, 0 to 1.
    """
    return is_in_share(f"{policy}/{unit}", share)


def is_in_share(name: str, share: float) -> bool:
    """True if a name is among this share of all names, by its hash."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * _RANGE


# Corrections ----------------------------------------------------------------------------------------------------------
# Whether a batch corrects anything, see `train.corrected_share`.

# Where only ratings tell praise from blame, one thumb says too little of a batch.
_LEAST_RATED = 2


def is_correction(recipe: Recipe, reward: float | None, *, hinted: bool) -> bool:
    """True if a reply was blamed, or has a hint that is learned from.

    A next message may be anything, thanks or another request, so that a recipe which learns from it goes by blame.
    """
    train, by_message = recipe.train, recipe.signal.teaches_by_message
    blamed = reward is not None and reward < 0 and (train.uses_rewards or by_message)
    return blamed or (hinted and train.uses_hints and not by_message)


def nothing_to_correct(recipe: Recipe, samples: Sequence[tuple[float | None, bool]]) -> str | None:
    """The reason to make no step of a batch that only praises what is so; None if enough of it corrects something.

    Args:
        samples: of each of users: its reward, and whether it has a hint.
    """
    what, share = "samples blamed or hinted", recipe.train.corrected_share
    if recipe.signal.teaches_by_message:
        what, samples = "rated replies blamed", [(reward, hinted) for reward, hinted in samples if reward]
        if len(samples) < _LEAST_RATED:
            return None
    corrected = sum(is_correction(recipe, reward, hinted=hinted) for reward, hinted in samples)
    if corrected >= share * len(samples):
        return None
    return f"nothing to correct: {corrected} of {len(samples)} {what}, {share:g} of them are needed"


# Eligibility ----------------------------------------------------------------------------------------------------------
# Conditions under which a turn can be trained, and the reasons why not.
#
# Of all sampling settings the trainer can reproduce one, the temperature, by dividing its logits by it. With any other
# setting that changes the distribution, the recorded log-probs are those of another policy than the trained one, so
# such a turn is relayed, judged and shown, but not trained. Field names and neutral values are vLLM's (0.32.0, chat
# completions); an unreadable value counts as set.

PREFIX = "not trainable: "
WITH_LESSONS = "answered with lessons"
LESSON_ERASED = "lesson erased"

# Between 0 and this vLLM silently samples at 0.01, and below 0.00001 it is greedy.
_LOWEST_TEMPERATURE = 0.01
_LOGPROB_OF_NOTHING = -9999.0  # how vLLM writes −∞

# Neutral if the number is; absent is neutral too.
_NUMBERS: dict[str, Callable[[float], bool]] = {
    "min_p": lambda value: value <= 0,
    "frequency_penalty": lambda value: value == 0,
    "presence_penalty": lambda value: value == 0,
    "repetition_penalty": lambda value: value == 1,
    "min_tokens": lambda value: value <= 0,
}
# Neutral only when absent or empty.
_ABSENT = (
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
    "use_beam_search",
    "logits_processors",
    "vllm_xargs",  # read by custom logits processors
    "thinking_token_budget",  # forces the end of thinking
    "watermarking",
)
_READ = TEXT_PARTS | THINKING_PARTS | {"refusal"}


def why_not_trainable(
    *,
    status: TurnStatus,
    sampling: Mapping[str, JsonValue],
    tools: Sequence[JsonValue] | None,
    prompt_ids: Sequence[int] | None,
    response_ids: Sequence[int] | None,
    logprobs: Sequence[float] | None,
    unseen: Sequence[str],
    reply: Message | None = None,
    lessons: Sequence[ShownLesson] = (),
) -> str | None:
    """All reasons why the turn cannot be trained, e.g. `not trainable: top_p`; None if it can.

    A reply cut by a token limit is trained as it is.

    Args:
        sampling: every sampling field the engine was given, with defaults filled in.
        tools: the request's tools; a strict one makes vLLM constrain the reply even if `tool_choice` is auto.
        unseen: what of the request the trainer cannot read, as `unseen_parts` names it: it loads the decoder alone, so
            its log-probs would be those of a prompt without the image.
        reply: the assistant message; None where the reply is no answer to a person, as a judge's vote.
        lessons: that the prompt held: what was learned behind them would be learned for prompts with lessons only.

    Raises:
        EngineAnswerUnusable: response ids and log-probs differ in number.
    """
    reasons = [*_of_reply(status, prompt_ids, response_ids, logprobs), *sampling_problems(sampling, tools)]
    if reply is not None and response_ids and (empty := without_content(reply, len(response_ids))) is not None:
        reasons.append(empty)
    reasons += [f"{kind} in the prompt" for kind in unseen]
    if lessons:
        reasons.append(WITH_LESSONS if all(lesson.text for lesson in lessons) else LESSON_ERASED)
    return PREFIX + ", ".join(reasons) if reasons else None


def without_content(reply: Message, tokens: int) -> str | None:
    """The fault of a reply without content, such as thinking without an end; None if it has content.

    What is learned from such replies is to make more of them, whatever they were rewarded: in a replication of the
    method one-character replies became samples, and took the gradient's norm from 8 to 2,243.

    Args:
        tokens: of the reply, its end included if the model ended it.
    """
    if reply.get("tool_calls") or reply.get("refusal"):
        return None
    written = _text_of(reply)
    text = without_leading_thinking(written).strip()
    if not text:
        return "thinking without an end" if written.strip() or reply.get("reasoning_content") else "empty reply"
    if tokens == 1:
        return "reply of one token"
    lone_sign = len(text) == 1 and not text.isalnum()  # "4" may answer, "." does not
    return "reply of one character" if lone_sign or is_of_one_character(text) else None


def _text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def unseen_parts(messages: Sequence[Message]) -> list[str]:
    """Kinds of content in these messages that is no text, each once; `other content` for a kind that is not known."""
    found: list[str] = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and str(part.get("type")) not in _READ:
                kind = kind_of_part(part) or "other content"  # in words of ours, as reasons reach Temporal
                found += [kind] if kind not in found else []
    return found


def _of_reply(
    status: TurnStatus,
    prompt_ids: Sequence[int] | None,
    response_ids: Sequence[int] | None,
    logprobs: Sequence[float] | None,
) -> list[str]:
    reasons: list[str] = []
    if status not in (TurnStatus.COMPLETE, TurnStatus.LENGTH):
        reasons.append(f"reply {status.value}")
    if not prompt_ids:
        reasons.append("prompt ids unknown")
    if response_ids is None:
        reasons.append("response ids unknown")
    elif not response_ids:
        reasons.append("empty reply")
    if logprobs is None:
        reasons.append("log-probs unknown")
        return reasons
    if response_ids is not None and len(response_ids) != len(logprobs):
        raise EngineAnswerUnusable(f"{len(logprobs)} log-probs for {len(response_ids)} response ids")
    if not all(math.isfinite(value) and value > _LOGPROB_OF_NOTHING for value in logprobs):
        reasons.append("log-probs not finite")
    return reasons


def sampling_problems(sampling: Mapping[str, JsonValue], tools: Sequence[JsonValue] | None) -> list[str]:
    """The settings that keep a reply from being trained, by name where a client could have given them."""
    reasons = _temperature(sampling.get("temperature"))
    # The gateway fills these two in, so a missing one is not neutral but unknown.
    reasons += _filled(sampling, "top_p", lambda value: value >= 1)
    reasons += _filled(sampling, "top_k", lambda value: value <= 0)
    for name, neutral in _NUMBERS.items():
        value = sampling.get(name)
        if value is not None:
            number = _number(value)
            reasons += [] if number is not None and neutral(number) else [name]
    reasons += [name for name in _ABSENT if _is_set(sampling.get(name))]
    # One fixed reason instead of the field's name: reasons reach Temporal, which must hold no text of a client.
    if any(name.startswith("guided_") and _is_set(value) for name, value in sampling.items()):
        reasons.append("guided decoding")
    response_format = sampling.get("response_format")
    if _is_set(response_format) and not (isinstance(response_format, dict) and response_format.get("type") == "text"):
        reasons.append("response_format")
    if sampling.get("tool_choice") not in (None, "auto", "none"):
        reasons.append("tool_choice")
    elif sampling.get("tool_choice") != "none" and any(_is_strict(tool) for tool in tools or ()):
        reasons.append("strict tool")
    elif tools and sampling.get("tool_choice") != "none" and sampling.get("parallel_tool_calls") is False:
        reasons.append("parallel_tool_calls")  # vLLM ends the reply after one call by a grammar
    return reasons


def _temperature(value: JsonValue) -> list[str]:
    number = _number(value)
    if number is None:
        return ["temperature unknown"]
    if number == 0:
        return ["temperature 0"]
    return [] if math.isfinite(number) and number >= _LOWEST_TEMPERATURE else ["temperature"]


def _filled(sampling: Mapping[str, JsonValue], name: str, neutral: Callable[[float], bool]) -> list[str]:
    number = _number(sampling.get(name))
    if number is None:
        return [f"{name} unknown"]
    return [] if neutral(number) else [name]


def _number(value: JsonValue) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def _is_set(value: JsonValue) -> bool:
    return not (value is None or value is False or value == [] or value == {})


def _is_strict(tool: JsonValue) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and _is_set(function.get("strict"))


# Decisions ------------------------------------------------------------------------------------------------------------
# The outcome of a judged turn: the terms of its training sample, or why there is none.
#
# A sample's advantage has a reward term, a teacher term, or both; the trainer computes them. An absent term is None,
# never 0: a sample without a hint has no teacher term, and one with verdict 0 has no reward term.


def decide(signal: Signal, verdict: Verdict, hint: HintChoice, not_trainable: str | None) -> TurnDecision:
    """The decision for a judged turn, as docs/learning.md describes.

    Args:
        signal: says whether the policy learns from verdicts, ratings and hints.
        not_trainable: the reason `why_not_trainable` gave; such a turn is judged and shown, but not sampled.
    """
    reward = (verdict.reward or None) if signal.takes_ratings else None
    hints = hint.texts if signal.hints else ()
    why = _why(signal, verdict, hint)
    if reward is None and not hints:
        unknown = verdict.verdict is None if signal.verdicts else not hint.answered
        return TurnDecision(TurnOutcome.UNJUDGED if unknown else TurnOutcome.UNDECIDED, why)
    if not_trainable is not None:
        return TurnDecision(TurnOutcome.NOT_TRAINABLE, f"{not_trainable} ({why})")
    return TurnDecision(TurnOutcome.SAMPLED, why, reward, hints)


_BY_MESSAGE = ("the user's words teach it", "no words teach it")


def _why(signal: Signal, verdict: Verdict, hint: HintChoice) -> str:
    of_verdict = verdict.why if verdict.verdict is None else f"verdict {in_words(verdict.verdict)}: {verdict.why}"
    taught, untaught = ("hint", "no hint") if signal.asks_for_hints else _BY_MESSAGE
    of_hint = f"{taught if hint.texts else untaught}: {hint.why}"
    shown = signal.verdicts or (signal.takes_ratings and verdict.verdict is not None)
    return "; ".join([of_verdict] * shown + [of_hint] * signal.hints)


# At least one ---------------------------------------------------------------------------------------------------------
# The at-least-one rule: a session that closes without a sample gets one, if one of its turns can give it.

SMALLEST_EXPECTED = 0.05  # an expected score nearer to 0 says too little to make a sample of


@dataclass(frozen=True, slots=True)
class JudgedTurn:
    """A judged main turn of a closing session.

    Args:
        expected: expected score; None without a valid vote.
        trainable: the turn can be trained.
        sampled: the turn has a sample already, in any state but superseded.
    """

    turn_id: TurnId
    expected: float | None
    trainable: bool
    sampled: bool


@dataclass(frozen=True, slots=True)
class FallbackSample:
    """Result of the at-least-one rule at a session's first close.

    Args:
        turn_id, reward: the turn to sample and its reward; None if no sample is made.
        ask: turns that need a direct vote; then apply the rule again with `direct=True`.
        why: one line for people.
    """

    turn_id: TurnId | None
    reward: float | None
    ask: tuple[TurnId, ...]
    why: str


def at_least_one(turns: Sequence[JudgedTurn], *, direct: bool = False) -> FallbackSample:
    """The judged turn with the largest |expected score|, the first of equals, unless a turn has a sample already.

    Args:
        direct: the expected scores come from direct votes, so no direct vote is asked for.
    """
    if any(turn.sampled for turn in turns):
        return FallbackSample(None, None, (), "has a sample")
    scored = [
        (abs(turn.expected), turn.expected, turn.turn_id)
        for turn in turns
        if turn.trainable and turn.expected is not None
    ]
    if not scored:
        return FallbackSample(None, None, (), "no sample: no judged turn that can be trained")
    size, score, turn_id = max(scored, key=lambda candidate: candidate[0])
    if size == 0 and not direct:
        ask = tuple(candidate for _, _, candidate in scored)
        return FallbackSample(None, None, ask, "votes cancel out: direct vote asked for")
    if size < SMALLEST_EXPECTED:
        return FallbackSample(None, None, (), f"no sample: the largest mean vote is {score:+.2f}")
    return FallbackSample(turn_id, score, (), f"the only sample of its session: mean vote {score:+.2f}")
