"""Recorded turns of a key, as its client gets them back: `previous_response_id`, and replies by their id."""

from __future__ import annotations

import time

from api.chat.request import INSTRUCTIONS
from api.dependencies import Services
from api.wire.reply import Chunk
from clawloop.contracts.serving import ApiKey
from clawloop.contracts.turns import Message, StoredTurn, TurnOutcome
from clawloop.errors import RequestRejected, StoreUnavailable
from clawloop.ids import turn_id_of, version_name
from clawloop.turns.continued import whole_reply

# A turn that PostgreSQL did not take in time waits on a gateway's disk for about as long.
_MAY_BE_ON_DISK_SECONDS = 30.0
_FIELDS = ("role", "content", "reasoning_content", "tool_calls")


async def stored_turn(services: Services, key: ApiKey, reply: str, field: str) -> StoredTurn:
    """The turn of this key that has this reply.

    Args:
        reply: its id.
        field: the client's field that has it.

    Raises:
        RequestRejected: 404; this key has no such reply, or it was erased.
        StoreUnavailable: it may be on its way to PostgreSQL.
    """
    turn_id = turn_id_of(reply)
    stored = None if turn_id is None else await services.turns.load(turn_id)
    if stored is not None and stored.record.api_key_id == key.id and stored.outcome is not TurnOutcome.ERASED:
        return stored
    if stored is None and turn_id is not None and turn_id.version == 7:
        age_seconds = time.time() - (turn_id.int >> 80) / 1000
        if 0 <= age_seconds < _MAY_BE_ON_DISK_SECONDS:
            raise StoreUnavailable(f"the turn {turn_id} is not stored yet")
    # The same answer for a reply of another key: keys must not learn of each other's replies.
    raise RequestRejected(
        f"`{field}`: this key has no such reply, or it was erased.", status=404, code="not_found", field=field
    )


def conversation(stored: StoredTurn) -> list[Message]:
    """The messages of a turn and its reply."""
    record = stored.record
    if record.response is None:
        return list(record.messages)
    before, reply = whole_reply(record.messages, record.response, record.sampling)
    return [*before, {name: reply[name] for name in _FIELDS if name in reply}]


def instructions_of(stored: StoredTurn) -> int:
    """Number of characters of the conversation's system message that are a request's `instructions`."""
    found = stored.record.sampling.get(INSTRUCTIONS)
    return found if isinstance(found, int) else 0


def as_completion(stored: StoredTurn, base_model: str) -> Chunk:
    """A stored turn as the chat completion it was."""
    record = stored.record
    message = record.response or {"role": "assistant", "content": ""}
    prompt, response = len(record.prompt_ids or ()), len(record.response_ids or ())
    return {
        "id": "",
        "object": "chat.completion",
        "created": int(record.started_at.timestamp()),
        "model": version_name(record.policy, record.version, base_model),
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": record.finish_reason}],
        "usage": {"prompt_tokens": prompt, "completion_tokens": response, "total_tokens": prompt + response},
    }
