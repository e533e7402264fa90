"""Samples in PostgreSQL: inserted, their states, and a batch of them with its tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.sessions import TurnResult
from clawloop.core.contracts.training import UNTAKEN, BatchSample, SampleState
from clawloop.core.contracts.turns import TurnKind, TurnOutcome
from clawloop.core.errors import RecordUnusable
from clawloop.core.ids import EpisodeId, JudgementId, SampleId, SessionId, TurnId, new_sample_id
from clawloop.core.judging.hints import PromptChange
from clawloop.core.recipes.recipe import Train, held_out_share
from clawloop.core.samples.decision import is_held_out
from db.content import (
    bytes_to_changes,
    bytes_to_ids,
    bytes_to_logprobs,
    changes_to_bytes,
    content_of,
    storable,
    token_count,
)
from db.encryption.columns import opened
from db.tables import PolicyRow, RecipeRow, SampleRow, SessionRow, TurnRow
from db.turns.read import ConversationCache

# States ---------------------------------------------------------------------------------------------------------------
# Inserts samples and changes their state, in the caller's transaction.
#
# A sample's token ids and log-probs are those of its turn; they are stored once.

# A turn shows the state of its newest sample; an erased turn stays erased.
_SET_OUTCOMES = text("""
    UPDATE turns t SET outcome = :outcome, outcome_detail = coalesce(:why, j.why)
    FROM samples s JOIN judgements j ON j.id = s.judgement_id
    WHERE s.id = ANY(:samples) AND t.id = s.turn_id AND t.outcome <> 'erased' AND NOT EXISTS (
        SELECT FROM samples later WHERE later.turn_id = t.id AND later.id > s.id AND later.state <> 'superseded')
""")
# Locks sample and turn as a claim does. A turn that is being judged, or gets the parent that was inserted after it, is
# skipped; its sample expires at the next claim.
_OF_OTHER_SIGNAL = text("""
    SELECT s.id FROM samples s JOIN turns t ON t.id = s.turn_id JOIN judgements j ON j.id = s.judgement_id
        JOIN recipes r ON r.hash = j.recipe_hash
    WHERE s.policy = :policy AND s.state = 'fresh' AND r.signal_hash <> (
        SELECT own.signal_hash FROM policies p JOIN recipes own ON own.hash = p.recipe_hash WHERE p.id = :policy)
    ORDER BY s.id LIMIT :limit FOR NO KEY UPDATE OF s, t SKIP LOCKED
""")
# A sample takes 0.1 ms, and a transaction must end within its limit; samples beyond it expire at the next claims.
_MOST_EXPIRED, _CHUNK = 10_000, 500
RECIPE_CHANGED = "recipe changed"

# Feedback on the turn while a step had its sample made a later judgement, which counts instead.
_FREE = text("""
    UPDATE samples s SET state = CASE WHEN o.overruled THEN 'superseded' ELSE 'fresh' END,
        reason = CASE WHEN o.overruled THEN 'a later judgement replaced this one' ELSE coalesce(o.why, '') END
    FROM (
        SELECT own.id, j.why, EXISTS (
            SELECT FROM judgements newer WHERE newer.turn_id = own.turn_id AND newer.revision > j.revision
                AND newer.decided_at IS NOT NULL) AS overruled
        FROM samples own JOIN judgements j ON j.id = own.judgement_id WHERE own.id = ANY(:samples)) o
    WHERE s.id = o.id RETURNING s.id, o.overruled
""")
# Lessons may have gone while a step had the sample.
_OF_LESSONS_GONE = text("""
    SELECT s.id, max(l.state) AS state FROM samples s JOIN practice p ON p.turn_id = s.turn_id
        JOIN lessons l ON l.id = ANY(p.lessons)
    WHERE s.id = ANY(:samples) AND l.state <> 'active' GROUP BY s.id
""")
# A sample may have been in abandoned steps before.
_TRAINED_TURNS = text("""
    WITH trained AS (
        SELECT id, outcome, outcome_detail FROM turns
        WHERE session_id = :session AND kind = 'main' AND outcome IN ('trained', 'rolled_back')
        ORDER BY id DESC LIMIT :limit),
    oldest AS (SELECT id FROM trained ORDER BY id LIMIT 1),
    numbered AS (
        SELECT id, row_number() OVER (ORDER BY id) + (
            SELECT count(*) FROM turns
            WHERE session_id = :session AND kind = 'main' AND id < (TABLE oldest)) AS number
        FROM turns WHERE session_id = :session AND kind = 'main' AND id >= (TABLE oldest)),
    newest AS (SELECT * FROM trained JOIN numbered USING (id))
    SELECT n.id, n.number, n.outcome, n.outcome_detail, l.verdict, l.step
    FROM newest n CROSS JOIN LATERAL (
        SELECT j.verdict, m.step FROM samples s JOIN judgements j ON j.id = s.judgement_id
            JOIN step_samples m ON m.sample_id = s.id JOIN steps p ON p.policy = m.policy AND p.n = m.step
        WHERE s.turn_id = n.id AND s.state = 'trained' AND p.state = 'committed'
        ORDER BY m.step DESC LIMIT 1) l
    ORDER BY n.id
""")


@dataclass(frozen=True, slots=True)
class SamplePlace:
    """The facts that decide whether a turn's sample is held out."""

    policy: str
    session_id: SessionId
    group_id: TurnId | None
    held_out_share: float


def sample_place(policy: str, row: Any) -> SamplePlace:
    """
    Args:
        row: with `session_id` and `group_id` of the turn and `content` of the policy's recipe.
    """
    share = 0.0 if row.content is None else held_out_share(row.content)
    return SamplePlace(policy, SessionId(row.session_id), None if row.group_id is None else TurnId(row.group_id), share)


def is_place_held_out(place: SamplePlace) -> bool:
    """True if a turn's sample is held out."""
    return is_held_out(place.policy, place.group_id or place.session_id, place.held_out_share)


async def _read_place(connection: AsyncConnection, turn_id: TurnId) -> SamplePlace:
    query = (
        select(SessionRow.policy, TurnRow.session_id, TurnRow.group_id, RecipeRow.content)
        .join(TurnRow, TurnRow.session_id == SessionRow.id)
        .join(PolicyRow, PolicyRow.id == SessionRow.policy)
        .outerjoin(RecipeRow, RecipeRow.hash == PolicyRow.recipe_hash)
        .where(TurnRow.id == turn_id)
    )
    row = (await connection.execute(query)).one()
    return sample_place(row.policy, row)


async def _had_by_a_step(connection: AsyncConnection, turn_id: TurnId) -> bool:
    states = (SampleState.CLAIMED, SampleState.TRAINED, SampleState.QUARANTINED)
    had = select(SampleRow.id).where(SampleRow.turn_id == turn_id, SampleRow.state.in_(states))
    return bool(await connection.scalar(select(had.exists())))


async def insert_sample(
    connection: AsyncConnection,
    judgement: JudgementId,
    turn_id: TurnId,
    reward: float | None,
    hinted_prompts: Mapping[int, PromptChange],
    reason: str,
    place: SamplePlace | None = None,
) -> None:
    """Insert the judgement's sample, or update it if no step has taken it.

    If the turn's session or group is held out, the sample is, and so is the turn: call this after setting its outcome.
    Not if a step has or had an earlier sample of the turn, e.g. before the recipe held anything out: versions are
    compared on what was never trained.

    Args:
        place: of the turn, where the caller has read it already.
    """
    place = place or await _read_place(connection, turn_id)
    held_out = is_place_held_out(place) and not await _had_by_a_step(connection, turn_id)
    hinted = changes_to_bytes(hinted_prompts) if hinted_prompts else None
    values = {
        "state": SampleState.HELD_OUT if held_out else SampleState.FRESH,
        "reason": reason,
        "reward": reward,
        "hinted_prompts": content_of(connection).write_bytes(hinted, "samples.hinted_prompts", judgement),
    }
    new = insert(SampleRow).values(
        id=new_sample_id(),
        judgement_id=judgement,
        turn_id=turn_id,
        policy=place.policy,
        **values,
    )
    untaken = SampleRow.state.in_(UNTAKEN)
    written = new.on_conflict_do_update(index_elements=[SampleRow.judgement_id], set_=values, where=untaken)
    sample = await connection.scalar(written.returning(SampleRow.id))
    if held_out and sample is not None:
        await set_turn_outcomes(connection, [SampleId(sample)], TurnOutcome.HELD_OUT, f"held out: {reason}")


async def supersede_others(connection: AsyncConnection, judgement: JudgementId, turn_id: TurnId, reason: str) -> None:
    """Supersede the samples of the turn's other judgements that no step has or had."""
    others = [SampleRow.turn_id == turn_id, SampleRow.judgement_id != judgement, SampleRow.state.in_(UNTAKEN)]
    values = {"state": SampleState.SUPERSEDED, "reason": f"judged again: {reason}"}
    await connection.execute(update(SampleRow).where(*others).values(values))


async def withdraw_sample(connection: AsyncConnection, judgement: JudgementId, reason: str) -> None:
    """Supersede the judgement's sample if no step has or had it."""
    fresh = update(SampleRow).where(SampleRow.judgement_id == judgement, SampleRow.state.in_(UNTAKEN))
    await connection.execute(fresh.values(state=SampleState.SUPERSEDED, reason=reason))


async def end_samples(
    connection: AsyncConnection, reasons: Mapping[SampleId, str], state: SampleState, outcome: TurnOutcome
) -> None:
    """Set the state and reason of samples and the outcome of their turns.

    Args:
        reasons: the reason of each sample.
        outcome: of their turns.
    """
    by_reason: defaultdict[str, list[SampleId]] = defaultdict(list)
    for sample, why in reasons.items():
        by_reason[storable(why)].append(sample)
    for why, samples in by_reason.items():
        await connection.execute(update(SampleRow).where(SampleRow.id.in_(samples)).values(state=state, reason=why))
        await set_turn_outcomes(connection, samples, outcome, why)


async def expire_samples_of_other_signal(connection: AsyncConnection, policy: str) -> None:
    """Expire fresh samples judged under another [signal] table than that of the policy's recipe."""
    for _ in range(_MOST_EXPIRED // _CHUNK):
        parameters = {"policy": policy, "limit": _CHUNK}
        samples = [SampleId(sample) for sample in await connection.scalars(_OF_OTHER_SIGNAL, parameters)]
        reasons = dict.fromkeys(samples, RECIPE_CHANGED)
        await end_samples(connection, reasons, SampleState.EXPIRED, TurnOutcome.EXPIRED)
        if len(samples) < _CHUNK:
            return


async def set_turn_outcomes(
    connection: AsyncConnection, samples: Collection[SampleId], outcome: TurnOutcome, why: str | None
) -> None:
    """Set the outcome of the turns whose newest sample is among these.

    Args:
        why: None takes the judgement's reason.
    """
    await connection.execute(_SET_OUTCOMES, {"samples": list(samples), "outcome": outcome.value, "why": why})


async def free_samples(connection: AsyncConnection, policy: str, samples: Collection[SampleId]) -> None:
    """Make samples fresh again, except samples whose turn was judged again since: they are superseded.

    If the recipe's [signal] table has changed meanwhile, they expire; so do practice samples with a lesson that is not
    active any more.
    """
    rows = (await connection.execute(_FREE, {"samples": list(samples)})).all()
    freed = [SampleId(row.id) for row in rows if not row.overruled]
    await set_turn_outcomes(connection, freed, TurnOutcome.SAMPLED, None)
    gone = (await connection.execute(_OF_LESSONS_GONE, {"samples": freed})).all()
    reasons = {SampleId(row.id): f"its lesson is {row.state}" for row in gone}
    await end_samples(connection, reasons, SampleState.EXPIRED, TurnOutcome.EXPIRED)
    await expire_samples_of_other_signal(connection, policy)


async def read_trained_turns(connection: AsyncConnection, session: SessionId, limit: int) -> list[TurnResult]:
    """The newest `limit` trained main turns of a session, in their order, including rolled-back ones."""
    return [
        TurnResult(
            turn_id=TurnId(row.id),
            number=row.number,
            kind=TurnKind.MAIN,
            outcome=TurnOutcome(row.outcome),
            verdict=row.verdict,
            sample=True,
            step=row.step,
            why=(row.outcome == TurnOutcome.ROLLED_BACK and row.outcome_detail) or f"trained in step {row.step}",
        )
        for row in await connection.execute(_TRAINED_TURNS, {"session": session, "limit": limit})
    ]


# Batches --------------------------------------------------------------------------------------------------------------
# Reads the samples of a batch with their tokens, or for each that cannot be trained the reason.

SAMPLE_COLUMNS = f"""s.id, s.turn_id, t.version, t.outcome, t.sampling, coalesce(t.prompt_shared, 0) AS prompt_shared,
    coalesce({token_count("t.prompt_ids")}, 0) AS prompt_added,
    coalesce({token_count("t.response_ids")}, 0) AS response_tokens,
    t.logprobs IS NOT NULL AS has_logprobs,
    {token_count("s.hinted_prompts")} AS hinted_tokens, EXISTS (
        SELECT FROM feedback f WHERE f.turn_id = s.turn_id AND f.applied_at <= j.decided_at) AS explicit"""
"""Columns that `sample_fault` needs, of a sample `s` of turn `t` and judgement `j`. It is `explicit` if the turn was
rated or commented on when it was decided; later feedback belongs to the next judgement."""

_SAMPLES = text(f"""
    SELECT {SAMPLE_COLUMNS}, s.judgement_id, s.reward, s.hinted_prompts, t.logprobs, t.episode_id
    FROM samples s JOIN turns t ON t.id = s.turn_id JOIN judgements j ON j.id = s.judgement_id
    WHERE s.id = ANY(:samples)
""")


async def read_samples(
    connection: AsyncConnection, conversations: ConversationCache, samples: Sequence[SampleId]
) -> dict[SampleId, BatchSample | str]:
    """Each sample in this order, or its fault, which names the turn."""
    found = await connection.execute(_SAMPLES, {"samples": list(samples)})
    rows = {row.id: row for row in opened(connection, found, turns="turn_id", samples="judgement_id")}
    return {sample: await _read(connection, conversations, rows[sample]) for sample in samples}


async def _read(connection: AsyncConnection, conversations: ConversationCache, row: Any) -> BatchSample | str:
    try:
        return await _decode(connection, conversations, row)
    except RecordUnusable as error:  # one damaged row must not quarantine its whole batch
        return f"turn {row.turn_id}: {error}"


async def _decode(connection: AsyncConnection, conversations: ConversationCache, row: Any) -> BatchSample | str:
    conversation = await conversations.load(connection, TurnId(row.turn_id))
    prompt, sampling = bytes_to_ids(conversation.prompt_ids or b""), row.sampling
    if (fault := sample_fault(row, len(prompt), sampling)) is not None:
        return fault
    hinted = row.hinted_prompts
    return BatchSample(
        sample_id=SampleId(row.id),
        prompt_ids=prompt,
        response_ids=bytes_to_ids(conversation.response_ids or b""),
        logprobs=bytes_to_logprobs(row.logprobs, row.response_tokens),
        temperature=float(sampling["temperature"]),
        version=row.version,
        reward=row.reward,
        hinted_prompts=_hinted_prompts(prompt, hinted),
        explicit=row.explicit,
        episode=None if row.episode_id is None else EpisodeId(row.episode_id),
    )


def _hinted_prompts(prompt: Sequence[int], stored: bytes | None) -> dict[int, list[int]]:
    changes = {} if stored is None else bytes_to_changes(stored)
    return {place: change.of(prompt) for place, change in changes.items()}


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
