"""A step's samples out of what their turns recorded: whole, or with the reason why they cannot be had.

Knows nothing about which samples a step takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.training import BatchSample
from clawloop.contracts.turns import TurnOutcome
from clawloop.errors import RecordUnusable
from clawloop.ids import SampleId, TurnId
from clawloop.recipes.recipe import Train
from db.arrays import ID_BYTES, bytes_to_ids, bytes_to_logprobs
from db.turns.conversation_cache import ConversationCache
from db.turns.deltas import Conversation

EXPLICIT = """EXISTS (
    SELECT FROM feedback f WHERE f.turn_id = s.turn_id AND f.applied_at <= j.decided_at)"""
"""Whether a sample `s` of a judgement `j` comes from explicit feedback: somebody had rated or commented on the turn
when it was decided. Feedback that came later belongs to the next judgement."""

_SAMPLES = text(f"""
    SELECT s.id, s.turn_id, s.reward, s.hinted_prompt_ids, t.version, t.outcome, t.logprobs, t.sampling,
        t.prompt_shared, octet_length(t.prompt_ids) AS prompt_added_bytes, {EXPLICIT} AS explicit
    FROM samples s JOIN turns t ON t.id = s.turn_id JOIN judgements j ON j.id = s.judgement_id
    WHERE s.id = ANY(:samples)
""")


async def read_samples(
    connection: AsyncConnection, conversations: ConversationCache, samples: Sequence[SampleId]
) -> dict[SampleId, BatchSample | RecordUnusable]:
    """Each sample with all that its turn recorded, in this order; an error, naming the turn, in place of a bad one."""
    rows = {row.id: row for row in await connection.execute(_SAMPLES, {"samples": list(samples)})}
    return {sample: await _read(connection, conversations, rows[sample]) for sample in samples}


async def _read(
    connection: AsyncConnection, conversations: ConversationCache, row: Any
) -> BatchSample | RecordUnusable:
    conversation = await conversations.conversation(connection, TurnId(row.turn_id))
    try:
        return _assembled(row, conversation)
    except RecordUnusable as error:
        return RecordUnusable(f"turn {row.turn_id}: {error}")


def _assembled(row: Any, conversation: Conversation) -> BatchSample:
    if row.outcome == TurnOutcome.ERASED:
        raise RecordUnusable("it was erased")
    prompt = conversation.prompt_ids or b""
    if len(prompt) != (row.prompt_shared or 0) * ID_BYTES + (row.prompt_added_bytes or 0):
        raise RecordUnusable(
            f"its prompt is {row.prompt_shared} tokens of its parent's and {(row.prompt_added_bytes or 0) // ID_BYTES}"
            f" more, but {len(prompt) // ID_BYTES} are there"
        )
    response_ids = bytes_to_ids(conversation.response_ids or b"")
    if not prompt or not response_ids:
        raise RecordUnusable(f"{len(prompt) // ID_BYTES} prompt and {len(response_ids)} response ids are known")
    if row.logprobs is None:
        raise RecordUnusable("its log-probs are unknown")
    temperature = row.sampling.get("temperature")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or temperature <= 0:
        raise RecordUnusable(f"it was sampled at temperature {temperature!r}")
    hinted = None if row.hinted_prompt_ids is None else bytes_to_ids(row.hinted_prompt_ids)
    if hinted == []:
        raise RecordUnusable("its prompt with the hint is empty")
    return BatchSample(
        sample_id=SampleId(row.id),
        prompt_ids=bytes_to_ids(prompt),
        response_ids=response_ids,
        logprobs=bytes_to_logprobs(row.logprobs, len(response_ids)),
        temperature=float(temperature),
        version=row.version,
        reward=row.reward,
        hinted_prompt_ids=hinted,
        explicit=row.explicit,
    )


def needs_version(recipe: Train, version: int, parent: int) -> bool:
    """Whether a version's files are needed to read a hint to what it answered, in a step from `parent`."""
    return recipe.uses_hints and recipe.teacher_version(version) not in (0, parent)
