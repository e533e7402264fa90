"""Token ids, log-probs and the message of each choice, read from an engine's answer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import orjson
from pydantic import JsonValue

from clawloop.core.contracts.turns import Message, TurnStatus
from clawloop.core.errors import EngineAnswerUnusable, EngineBroke

# Chunks of an engine --------------------------------------------------------------------------------------------------
# An engine's answers as JSON objects; an answer of an unexpected shape is an error with a status of its own.

_WRONG_SHAPE = (AttributeError, LookupError, TypeError, ValueError)


def parse_chunk(data: bytes) -> Chunk:
    """
    Raises:
        EngineBroke: the engine reports an error in place of an answer.
        EngineAnswerUnusable: the data is not a JSON object.
    """
    try:
        chunk: Any = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise EngineAnswerUnusable(f"not JSON ({error})") from error
    if not isinstance(chunk, dict):
        raise EngineAnswerUnusable("not a JSON object")
    if (reported := chunk.get("error")) is not None:
        raise EngineBroke(str(reported.get("message") if isinstance(reported, dict) else reported))
    return chunk


class ReadingAnswer(AbstractContextManager[None]):
    """Turns errors raised inside, by engine JSON of an unexpected shape, into `EngineAnswerUnusable`.

    A class without state: a stream enters it twice a chunk, and a generator costs ten times as much.

    Args:
        what: the problem, e.g. `a chunk is not a chat chunk`.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and isinstance(error, _WRONG_SHAPE):
            raise EngineAnswerUnusable(f"{self._what} ({type(error).__name__})") from error


# Capture --------------------------------------------------------------------------------------------------------------
# Collects token ids, log-probs and the message of each choice from an engine's answer.
#
# Ids and log-probs that the gateway asked for and the client did not are removed from each chunk. An answer whose
# parts disagree is recorded without tokens; the chat goes on.

_ENDS = {"length": TurnStatus.LENGTH, "abort": TurnStatus.ABORTED, "error": TurnStatus.ERROR}

# vLLM streams one JSON object per chunk.
Chunk = dict[str, Any]


@dataclass(slots=True)
class ChoiceCapture:
    """One choice of an answer, as far as it was received.

    Attributes:
        response_ids, logprobs: None once the engine omitted one or their lengths differed.
        unusable: why they are None.
        whole: the message of an answer that was not streamed.
    """

    index: int
    response_ids: list[int] | None = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    unusable: str | None = None
    finish_reason: str | None = None
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    tool_calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    whole: Message | None = None

    def take_tokens(self, ids: object, logprobs: object, *, has_content: bool) -> None:
        """Add the tokens of one chunk.

        Args:
            ids: the chunk's `token_ids`.
            logprobs: the chunk's `logprobs` object.
            has_content: the chunk has text or a tool call, so it must have tokens.
        """
        if self.response_ids is None or self.logprobs is None:
            return
        if ids is None and logprobs is None:
            if has_content:
                self._discard_tokens("the engine sent text without token ids")
            return
        entries = logprobs.get("content") if isinstance(logprobs, dict) else None
        if not isinstance(ids, list) or not isinstance(entries, list):
            # A last chunk without a token has an empty list of ids and no log-probs.
            if not ids and not entries:
                return
            self._discard_tokens(
                "the engine sent token ids without log-probs" if ids else "log-probs without token ids"
            )
            return
        if len(ids) != len(entries):
            self._discard_tokens(f"the engine sent {len(ids)} token ids with {len(entries)} log-probs")
            return
        values: list[float] = []
        for entry in entries:  # one, as a rule
            value = entry.get("logprob") if isinstance(entry, dict) else None
            if isinstance(value, float | int):
                values.append(float(value))
        if len(values) != len(entries) or not _are_token_ids(ids):
            self._discard_tokens("the engine sent token ids or log-probs that are not numbers")
            return
        self.response_ids += ids
        self.logprobs += values

    def take_delta(self, delta: dict[str, Any]) -> bool:
        """Add one delta to the message; True if it has text or a tool call.

        Raises:
            AttributeError, TypeError: it is no delta.
        """
        has_content = False
        _copy_reasoning(delta)
        for name, said in (
            ("content", self.content),
            ("reasoning_content", self.reasoning),
            ("refusal", self.refusal),
        ):
            if text := _text(delta.get(name)):
                said.append(text)
                has_content = True
        for call in delta.get("tool_calls") or ():
            self._take_tool_call(call)
            has_content = True
        return has_content

    def message(self) -> Message | None:
        """The assistant message as the client has it; None if it is empty."""
        if self.whole is not None:
            return self.whole
        if not (self.content or self.reasoning or self.tool_calls or self.refusal or self.finish_reason):
            return None
        message: Message = {"role": "assistant", "content": "".join(self.content) if self.content else None}
        if message["content"] is None and not self.tool_calls:
            message["content"] = ""
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.refusal:
            message["refusal"] = "".join(self.refusal)
        if self.tool_calls:
            message["tool_calls"] = [self.tool_calls[index] for index in sorted(self.tool_calls)]
        return message

    def status(self) -> TurnStatus:
        """The turn status for the finish reason; call it after the choice ended."""
        return _ENDS.get(self.finish_reason or "", TurnStatus.COMPLETE)

    def require_tokens(self, missing: int = 0) -> None:
        """A reply that ended has tokens, if only that of its end, and all of them: a part is not what was sampled.

        Args:
            missing: how many the engine counted and did not send.
        """
        if self.response_ids is None or _ENDS.get(self.finish_reason or "") in (TurnStatus.ABORTED, TurnStatus.ERROR):
            return
        if missing > 0:
            self._discard_tokens(f"the engine counted {missing} tokens more than it sent token ids")
        elif not self.response_ids:
            self._discard_tokens("the engine sent no token ids")

    def _take_tool_call(self, delta: dict[str, Any]) -> None:
        index = delta.get("index", 0)
        if not isinstance(index, int):
            raise TypeError(f"tool call {index!r}")
        call = self.tool_calls.setdefault(
            index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        if delta.get("id"):
            call["id"] = _text(delta["id"])
        if delta.get("type"):
            call["type"] = delta["type"]
        function = delta.get("function") or {}
        call["function"]["name"] += _text(function.get("name"))
        call["function"]["arguments"] += _text(function.get("arguments"))

    def _discard_tokens(self, reason: str) -> None:
        self.response_ids = self.logprobs = None
        self.unusable = reason


class Capture:
    """All choices of one answer.

    Args:
        choices: how many the client asked for.
        keep_logprobs: the client asked for log-probs.
        keep_ids: the client asked for token ids.
        keep_reasoning: the client did not ask for replies without it.
    """

    def __init__(self, *, choices: int, keep_logprobs: bool, keep_ids: bool, keep_reasoning: bool = True) -> None:
        self.choices = [ChoiceCapture(index) for index in range(choices)]
        self.prompt_ids: list[int] | None = None
        self._keep_reasoning = keep_reasoning
        self._keep_logprobs = keep_logprobs
        self._keep_ids = keep_ids

    def take_chunk(self, chunk: Chunk) -> list[ChoiceCapture]:
        """Add one stream chunk; remove from it what the client did not ask for.

        Returns:
            The choices that end with this chunk.

        Raises:
            AttributeError, IndexError, KeyError, TypeError: the chunk is not a chat chunk.
        """
        self._take_prompt(chunk)
        ended: list[ChoiceCapture] = []
        for choice in chunk["choices"]:
            captured = self._choice(choice["index"])
            has_content = captured.take_delta(choice["delta"])
            self._strip_reasoning(choice["delta"])
            self._take_tokens(choice, captured, has_content=has_content)
            if choice.get("finish_reason") is not None:
                captured.finish_reason = _finish_reason(choice["finish_reason"])
                captured.require_tokens()
                ended.append(captured)
        return ended

    def take_body(self, body: Chunk) -> list[ChoiceCapture]:
        """Add a whole answer; remove from it what the client did not ask for.

        Returns:
            All choices.

        Raises:
            AttributeError, IndexError, KeyError, TypeError: the body is not a chat completion.
        """
        self._take_prompt(body)
        for choice in body["choices"]:
            captured = self._choice(choice["index"])
            message: dict[str, JsonValue] = choice["message"]
            _copy_reasoning(message)
            _require_message(message)
            captured.whole = {name: value for name, value in message.items() if value not in (None, [])}
            captured.whole.setdefault("content", None if captured.whole.get("tool_calls") else "")
            captured.finish_reason = _finish_reason(choice["finish_reason"])
            self._strip_reasoning(message)
            self._take_tokens(choice, captured, has_content=bool(message.get("content")))
        if len(body["choices"]) != len(self.choices):
            raise IndexError(f"{len(body['choices'])} choices for n = {len(self.choices)}")
        usage = body.get("usage")
        counted = usage.get("completion_tokens") if isinstance(usage, dict) else None
        sent = sum(len(captured.response_ids or ()) for captured in self.choices)
        for captured in self.choices:
            captured.require_tokens(counted - sent if isinstance(counted, int) else 0)
        return self.choices

    def _strip_reasoning(self, part: Chunk) -> None:
        if not self._keep_reasoning:
            part.pop("reasoning", None)
            part.pop("reasoning_content", None)

    def _choice(self, index: object) -> ChoiceCapture:
        if not isinstance(index, int) or not 0 <= index < len(self.choices):
            raise IndexError(f"choice {index!r} of {len(self.choices)}")
        return self.choices[index]

    def _take_prompt(self, chunk: Chunk) -> None:
        ids = chunk.get("prompt_token_ids")
        if isinstance(ids, list) and _are_token_ids(ids):
            self.prompt_ids = ids
        if not self._keep_ids:
            chunk.pop("prompt_token_ids", None)
            chunk.pop("prompt_text", None)

    def _take_tokens(self, choice: Chunk, captured: ChoiceCapture, *, has_content: bool) -> None:
        captured.take_tokens(choice.get("token_ids"), choice.get("logprobs"), has_content=has_content)
        if not self._keep_ids:
            choice.pop("token_ids", None)
        if not self._keep_logprobs and "logprobs" in choice:
            choice["logprobs"] = None


def _finish_reason(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"finish_reason {value!r}")
    return value


def _text(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in place of a text")
    return value


def _require_message(message: dict[str, Any]) -> None:
    """
    Raises:
        AttributeError, KeyError, TypeError: it is no message of an assistant.
    """
    for name in ("content", "reasoning_content", "refusal"):
        _text(message.get(name))
    for call in message.get("tool_calls") or ():
        for value in (call["id"], call["function"]["name"], call["function"].get("arguments")):
            _text(value)


def _are_token_ids(ids: list[Any]) -> bool:
    """True if these are token ids: below 2^31, as in any vocabulary, and no booleans, which are ints to Python."""
    if len(ids) == 1:  # of most chunks
        return type(ids[0]) is int and 0 <= ids[0] < 2**31
    # Without a loop in Python: a prompt may have 32,000 of them.
    return not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 2**31)


def _copy_reasoning(part: dict[str, Any]) -> None:
    """Add `reasoning_content`, which clients such as OpenClaw read, beside vLLM's `reasoning`."""
    if "reasoning_content" not in part and "reasoning" in part:
        part["reasoning_content"] = part["reasoning"]
