"""Ids, and their external forms.

Ids made here are UUIDv7, which sort by creation time. Session ids are UUIDv5, so that the same key and client value
always give the same session.
"""

from __future__ import annotations

from typing import NewType
from uuid import UUID

from uuid6 import uuid7

TurnId = NewType("TurnId", UUID)
SessionId = NewType("SessionId", UUID)
ApiKeyId = NewType("ApiKeyId", UUID)
JudgementId = NewType("JudgementId", UUID)
SampleId = NewType("SampleId", UUID)
FeedbackId = NewType("FeedbackId", UUID)
EventId = NewType("EventId", UUID)
RolloutGroupId = NewType("RolloutGroupId", UUID)
EpisodeId = NewType("EpisodeId", UUID)
ProbeId = NewType("ProbeId", UUID)
FileId = NewType("FileId", UUID)
LessonId = NewType("LessonId", UUID)

# Prefixes of a reply's id: chat completions, completions, Anthropic's Messages, OpenAI's Responses.
_CHAT, _COMPLETION, _MESSAGE, _RESPONSE = "chatcmpl-", "cmpl-", "msg_", "resp_"
_SHORTEST_FORM = 8
_SHORTEST_PREFIX = 4
_DIGITS = 32


def new_turn_id() -> TurnId:
    """A new turn id, greater than every id made before it by this process, also where the clock was set back."""
    return TurnId(UUID(int=uuid7().int))


def new_api_key_id() -> ApiKeyId:
    return ApiKeyId(UUID(int=uuid7().int))


def new_judgement_id() -> JudgementId:
    return JudgementId(UUID(int=uuid7().int))


def new_sample_id() -> SampleId:
    return SampleId(UUID(int=uuid7().int))


def new_feedback_id() -> FeedbackId:
    return FeedbackId(UUID(int=uuid7().int))


def new_event_id() -> EventId:
    return EventId(UUID(int=uuid7().int))


def new_rollout_group_id() -> RolloutGroupId:
    return RolloutGroupId(UUID(int=uuid7().int))


def new_episode_id() -> EpisodeId:
    return EpisodeId(UUID(int=uuid7().int))


def new_probe_id() -> ProbeId:
    return ProbeId(UUID(int=uuid7().int))


def new_file_id() -> FileId:
    return FileId(UUID(int=uuid7().int))


def new_lesson_id() -> LessonId:
    return LessonId(UUID(int=uuid7().int))


def response_id(turn_id: TurnId) -> str:
    """The `id` of a client's chat completion."""
    return f"{_CHAT}{turn_id.hex}"


def completion_id(turn_id: TurnId) -> str:
    """The `id` of a plain completion."""
    return f"{_COMPLETION}{turn_id.hex}"


def message_id(turn_id: TurnId) -> str:
    """The `id` of a reply in Anthropic's Messages."""
    return f"{_MESSAGE}{turn_id.hex}"


def responses_id(turn_id: TurnId) -> str:
    """The `id` of a reply in OpenAI's Responses."""
    return f"{_RESPONSE}{turn_id.hex}"


def turn_id_of(response: str) -> TurnId | None:
    """The turn of a reply's `id`; None if Clawloop did not make the id."""
    try:
        return TurnId(UUID(hex=without_kind(response)))
    except ValueError:
        return None


def without_kind(response: str) -> str:
    """A reply's `id`, or the beginning of one, without the word that says which kind of reply it is."""
    prefix = next((prefix for prefix in (_CHAT, _COMPLETION, _MESSAGE, _RESPONSE) if response.startswith(prefix)), "")
    return response.removeprefix(prefix)


def short_form(own: UUID, *neighbours: UUID | None) -> str:
    """The shortest beginning of an id, of 8 characters at least, that no other id has.

    Args:
        neighbours: the next smaller and the next greater id; None where there is none.
    """
    text = str(own)
    length = _SHORTEST_FORM
    for other in neighbours:
        if other is not None:
            length = max(length, 1 + _shared(text, str(other)))
    return text[: length + 1] if text[length - 1] == "-" else text[:length]


def ids_beginning(prefix: str) -> tuple[UUID, UUID] | None:
    """The first and the last id that begin with these hexadecimal digits; None if they are no beginning of an id."""
    digits = prefix.replace("-", "")
    if not _SHORTEST_PREFIX <= len(digits) <= _DIGITS or not set(digits.lower()) <= set("0123456789abcdef"):
        return None
    return UUID(hex=digits.ljust(_DIGITS, "0")), UUID(hex=digits.ljust(_DIGITS, "f"))


def _shared(left: str, right: str) -> int:
    """Length of the common prefix of two texts."""
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def version_name(policy: str, version: int, base_model: str) -> str:
    """The model name of a version on engines: the base model's own for version 0, otherwise `{policy}-v{n}`."""
    return base_model if version == 0 else f"{policy}-v{version}"
