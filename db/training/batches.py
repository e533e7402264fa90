"""Reads the samples of a batch with their tokens, or for each that cannot be trained the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.training import BatchSample
from clawloop.contracts.turns import TurnOutcome
from clawloop.errors import RecordUnusable
from clawloop.ids import EpisodeId, SampleId, TurnId
from clawloop.recipes.recipe import Train
from db.arrays import ID_BYTES, bytes_to_ids, bytes_to_logprobs
from db.content import content_of, plain_length
from db.turns.conversation_cache import ConversationCache

SAMPLE_COLUMNS = f"""s.id, s.turn_id, t.version, t.outcome, t.sampling, coalesce(t.prompt_shared, 0) AS prompt_shared,
    coalesce({plain_length("t.prompt_ids")}, 0) / {ID_BYTES} AS prompt_added,
    coalesce({plain_length("t.response_ids")}, 0) / {ID_BYTES} AS response_tokens,
    t.logprobs IS NOT NULL AS has_logprobs,
    {plain_length("s.hinted_prompt_ids")} / {ID_BYTES} AS hinted_tokens, EXISTS (
        SELECT FROM feedback f WHERE f.turn_id = s.turn_id AND f.applied_at <= j.decided_at) AS explicit"""
"""Columns that `sample_fault` needs, of a sample `s` of turn `t` and judgement `j`. It is `explicit` if the turn was
rated or commented on when it was decided; later feedback belongs to the next judgement."""

_SAMPLES = text(f"""
    SELECT {SAMPLE_COLUMNS}, s.judgement_id, s.reward, s.hinted_prompt_ids, t.logprobs, t.episode_id
    FROM samples s JOIN turns t ON t.id = s.turn_id JOIN judgements j ON j.id = s.judgement_id
    WHERE s.id = ANY(:samples)
""")


async def read_samples(
    connection: AsyncConnection, conversations: ConversationCache, samples: Sequence[SampleId]
) -> dict[SampleId, BatchSample | str]:
    """Each sample in this order, or its fault, which names the turn."""
    rows = {row.id: row for row in await connection.execute(_SAMPLES, {"samples": list(samples)})}
    return {sample: await _read(connection, conversations, rows[sample]) for sample in samples}


async def _read(connection: AsyncConnection, conversations: ConversationCache, row: Any) -> BatchSample | str:
    try:
        return await _decode(connection, conversations, row)
    except RecordUnusable as error:  # one damaged row must not quarantine its whole batch
        return f"turn {row.turn_id}: {error}"


async def _decode(connection: AsyncConnection, conversations: ConversationCache, row: Any) -> BatchSample | str:
    conversation = await conversations.load(connection, TurnId(row.turn_id))
    prompt, content = conversation.prompt_ids or b"", content_of(connection)
    sampling = content.read_json(row.sampling, "turns.sampling", row.turn_id)
    if (fault := sample_fault(row, len(prompt) // ID_BYTES, sampling)) is not None:
        return fault
    hinted = content.read_bytes(row.hinted_prompt_ids, "samples.hinted_prompt_ids", row.judgement_id)
    return BatchSample(
        sample_id=SampleId(row.id),
        prompt_ids=bytes_to_ids(prompt),
        response_ids=bytes_to_ids(conversation.response_ids or b""),
        logprobs=bytes_to_logprobs(
            content.read_bytes(row.logprobs, "turns.logprobs", row.turn_id), row.response_tokens
        ),
        temperature=float(sampling["temperature"]),
        version=row.version,
        reward=row.reward,
        hinted_prompt_ids=None if hinted is None else bytes_to_ids(hinted),
        explicit=row.explicit,
        episode=None if row.episode_id is None else EpisodeId(row.episode_id),
    )


def sample_fault(row: Any, prompt_tokens: int, sampling: Mapping[str, Any]) -> str | None:
    """The reason that a sample cannot be trained; None if it can.

    Args:
        row: with `SAMPLE_COLUMNS`.
        prompt_tokens: length of the turn's prompt, rebuilt from its parent's tokens and its own.
        sampling: the turn's.
    """
    fault = _fault(row, prompt_tokens, sampling)
    return None if fault is None else f"turn {row.turn_id}: {fault}"


def _fault(row: Any, prompt_tokens: int, sampling: Mapping[str, Any]) -> str | None:
    if row.outcome == TurnOutcome.ERASED:
        return "it was erased"
    if prompt_tokens != row.prompt_shared + row.prompt_added:
        return (
            f"its prompt is {row.prompt_shared} tokens of its parent's and {row.prompt_added} more,"
            f" but {prompt_tokens} are there"
        )
    if not prompt_tokens or not row.response_tokens:
        return f"{prompt_tokens} prompt and {row.response_tokens} response ids are known"
    if not row.has_logprobs:
        return "its log-probs are unknown"
    temperature = sampling.get("temperature")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or temperature <= 0:
        return f"it was sampled at temperature {temperature!r}"
    if row.hinted_tokens == 0:
        return "its prompt with the hint is empty"
    return None


def needs_version(recipe: Train, version: int, parent: int) -> bool:
    """True if a step from `parent` needs this version's files to score hinted samples that the version answered."""
    return bool(recipe.versions_read(version) - {0, parent})
