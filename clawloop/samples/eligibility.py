"""Conditions under which a turn can be trained, and the reasons why not.

Of all sampling settings the trainer can reproduce one, the temperature, by dividing its logits by it. With any other
setting that changes the distribution, the recorded log-probs are those of another policy than the trained one, so such
a turn is relayed, judged and shown, but not trained. Field names and neutral values are vLLM's (0.32.0, chat
completions); an unreadable value counts as set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from pydantic import JsonValue

from clawloop.contracts.turns import Message, TurnStatus
from clawloop.errors import EngineAnswerUnusable
from clawloop.turns.canonical import TEXT_PARTS
from clawloop.turns.part_names import kind_of_part
from clawloop.turns.thinking import THINKING_PARTS

PREFIX = "not trainable: "

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
) -> str | None:
    """All reasons why the turn cannot be trained, e.g. `not trainable: top_p`; None if it can.

    A reply cut by a token limit is trained as it is.

    Args:
        sampling: every sampling field the engine was given, with defaults filled in.
        tools: the request's tools; a strict one makes vLLM constrain the reply even if `tool_choice` is auto.
        unseen: what of the request the trainer cannot read, as `unseen_parts` names it: it loads the decoder alone, so
            its log-probs would be those of a prompt without the image.

    Raises:
        EngineAnswerUnusable: response ids and log-probs differ in number.
    """
    reasons = [*_of_reply(status, prompt_ids, response_ids, logprobs), *sampling_problems(sampling, tools)]
    reasons += [f"{kind} in the prompt" for kind in unseen]
    return PREFIX + ", ".join(reasons) if reasons else None


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
