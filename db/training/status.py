"""Reads the status of a policy's training, what a version was trained on, and what happened since."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import TextClause, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.answers import Counts, PolicyEvent, ReplyFigures, TrainedReply
from clawloop.core.contracts.training import StepProgress, StepState, TrainingState, TrainingView
from clawloop.core.contracts.views import TaughtHint
from clawloop.core.errors import RecipeRejected, RecordUnusable
from clawloop.core.gate.canary import traffic, version_for_all
from clawloop.core.ids import SampleId, SessionId, TurnId
from clawloop.core.recipes.recipe import Gate, Recipe, parse_stored_recipe
from db.content import storable, token_count
from db.database import PostgresStore, transaction
from db.encryption.columns import opened
from db.judging.tables import HINT_SOURCE, newest_judgement
from db.tables import EventRow
from db.training.claims import closed_by_canary, read_closed
from db.training.gate_checks import read_canary_sessions
from db.training.policies import next_step, require_policy
from db.turns.exchanges import read_feedback, read_reactions

# Status ---------------------------------------------------------------------------------------------------------------
# Reads the status of a policy's training, in the caller's transaction.

# Samples of another [signal] table are not ready: no step takes them. Of those held out, as many as a batch has are
# enough to tell that a batch of them came without a step; of rollout groups the newest as many as a batch can have.
_STATUS = text("""
    SELECT p.id, p.pool, sr.content AS step_recipe, p.head, p.active, p.epoch, p.pinned, p.canary, p.canary_since,
        p.retired_at,
        (SELECT coalesce(c.parent, 0) FROM versions c WHERE c.policy = p.id AND c.n = p.canary) AS canary_parent,
        p.paused_reason, p.rejections, r.content,
        waits.ready, waits.groups, waits.oldest_seconds,
        (SELECT count(*) FROM (
            SELECT s.created_at FROM samples s
            WHERE s.policy = p.id AND s.state = 'held_out' AND s.rollout_group_id IS NULL
            ORDER BY s.id DESC LIMIT coalesce(CAST(r.content->'train'->>'batch_samples' AS int), 0)) h
            WHERE h.created_at > last_claim.at
        ) AS held_out,
        (SELECT count(*) FROM (
            SELECT g.id FROM rollout_groups g WHERE g.policy = p.id ORDER BY g.id DESC LIMIT 1000) g
            WHERE EXISTS (
                SELECT FROM samples s WHERE s.policy = p.id AND s.rollout_group_id = g.id AND s.state = 'held_out'
                    AND s.created_at > last_claim.at)
        ) AS held_out_groups,
        EXISTS (SELECT FROM probes WHERE policy = p.id AND NOT general) AS has_probes, p.general_known,
        (SELECT count(*) FROM turns t JOIN sessions c ON c.id = t.session_id
            WHERE t.outcome = 'waiting' AND t.episode_id IS NULL AND c.policy = p.id) AS judging,
        st.n AS step, st.attempt, st.state AS step_state, st.progress, st.tokens_a_second, st.seconds_left,
        extract(epoch FROM now() - st.attempt_at) AS attempt_seconds
    FROM policies p LEFT JOIN recipes r ON r.hash = p.recipe_hash
        LEFT JOIN steps st ON st.policy = p.id AND st.state IN ('claimed', 'candidate')
        LEFT JOIN recipes sr ON sr.hash = st.recipe_hash
        CROSS JOIN LATERAL (SELECT coalesce(
            (SELECT o.claimed_at FROM steps o WHERE o.policy = p.id ORDER BY o.n DESC LIMIT 1), '-infinity') AS at
        ) last_claim
        CROSS JOIN LATERAL (
            SELECT count(*) FILTER (WHERE s.rollout_group_id IS NULL) AS ready,
                count(DISTINCT s.rollout_group_id) AS groups,
                extract(epoch FROM now() - min(s.created_at)) AS oldest_seconds
            FROM samples s JOIN judgements j ON j.id = s.judgement_id JOIN recipes own ON own.hash = j.recipe_hash
            WHERE s.policy = p.id AND s.state = 'fresh' AND own.signal_hash = r.signal_hash) waits
    WHERE p.id = :policy
""")


async def read_status(connection: AsyncConnection, policy: str) -> TrainingView:
    """
    Raises:
        RecordUnusable: there is no such policy.
    """
    row = (await connection.execute(_STATUS, {"policy": policy})).one_or_none()
    if row is None:
        raise RecordUnusable(f"there is no policy {policy!r}")
    recipe, fault = _recipe(row.content)
    gated_by = recipe if row.step is None else _recipe(row.step_recipe)[0]
    needed = 0 if recipe is None else recipe.train.batch_samples
    claimed = None if row.step is None else open_step(row.step, StepState(row.step_state), row.attempt)
    closed = closed_by_canary(row.canary, row.pinned)
    if closed is not None and row.pinned is None:
        closed = replace(closed, reason=f"{closed.reason}: {await _traffic(connection, row)}")
    if closed is None and recipe is not None:
        closed = await read_closed(connection, policy, recipe)
    if row.paused_reason is not None:
        state = TrainingState.PAUSED
        reason = f"paused: {row.paused_reason}" + (f"; {claimed}" if claimed else "")
    elif claimed is not None:
        state, reason = TrainingState.TRAINING, claimed
    else:
        waits = waits_for(row.ready, needed, row.judging, row.held_out)
        if recipe is not None:
            waits += waits_for_groups(row.groups, recipe.train.batch_groups, row.held_out_groups)
            waits += after_rejections(row.rejections, recipe.gate)
        state = TrainingState.WAITING
        reason = fault or (waits if closed is None else f"{closed.reason}; {waits}")
    return TrainingView(
        policy=row.id,
        pool=row.pool,
        state=state,
        reason=reason,
        ready=row.ready,
        needed=needed,
        judging=row.judging,
        oldest_seconds=None if row.oldest_seconds is None else float(row.oldest_seconds),
        step=row.step or await next_step(connection, policy),
        step_state=None if row.step is None else StepState(row.step_state),
        head=row.head,
        version=row.active,
        epoch=row.epoch,
        pinned=row.pinned,
        unpublished=_unpublished(row),
        max_wait_seconds=None if recipe is None else 3600 * recipe.train.max_wait_hours,
        closed_seconds=None if closed is None else closed.seconds,
        canary=row.canary,
        canary_parent=row.canary_parent,
        probed=row.has_probes or (gated_by is not None and gated_by.gate.asks_probes),
        general_unasked=(
            row.general_known is None and row.retired_at is None and recipe is not None and recipe.gate.general_probes
        ),
        progress=_progress(row),
        practises=(
            row.retired_at is None and recipe is not None and recipe.lessons.enabled and recipe.lessons.practice
        ),
    )


async def _traffic(connection: AsyncConnection, row: Any) -> str:
    """The judged sessions of a canary so far."""
    sessions = await read_canary_sessions(connection, row.id, row.canary, row.canary_parent, row.canary_since)
    return traffic(*(len(of_version) for of_version in sessions))


def _progress(row: Any) -> StepProgress | None:
    """Progress of the open step, or of the version that it made."""
    if row.step is None:
        return StepProgress(f"publishing version {_answering(row)}") if _unpublished(row) else None
    if StepState(row.step_state) is StepState.CANDIDATE:
        return StepProgress(f"checking version {row.step} at the gate")
    seconds = None if row.attempt_seconds is None else float(row.attempt_seconds)
    waits = "waiting for the trainer" if not row.attempt else "beginning"
    return StepProgress(row.progress or waits, seconds, row.tokens_a_second, row.seconds_left)


def _unpublished(row: Any) -> bool:
    """True if another version should be active; a canary becomes active once verdicts have decided."""
    return row.retired_at is None and bool(row.active != _answering(row))


def _answering(row: Any) -> int:
    return version_for_all(row.head, row.pinned, row.canary_parent)


def waits_for(ready: int, needed: int, judging: int, held_out: int = 0) -> str:
    """E.g. `5 of 16 samples for the next step; 3 replies wait for a reaction or a verdict`.

    Args:
        held_out: samples held out since the last step. A whole batch of them is said: where sessions are few, most
            turns may be in one that is held out.
    """
    replies = "1 reply waits" if judging == 1 else f"{judging} replies wait"
    samples = f"{min(ready, needed)} of {needed} samples for the next step"
    if ready < needed <= held_out:
        samples += f"; {held_out} since the last step are held out with their sessions: lower gate.held_out"
    return f"{samples}; {replies} for a reaction or a verdict" if judging else samples


def waits_for_groups(ready: int, needed: int, held_out: int = 0) -> str:
    """E.g. `; 3 of 8 rollout groups`, to be added to what training waits for; empty without any.

    Args:
        held_out: groups held out since the last step. A whole batch of them is said.
    """
    groups = f"; {ready} of {needed} rollout groups" if ready else ""
    if ready < needed <= held_out:
        return f"{groups}; rollout groups held out since the last step: {held_out}: lower gate.held_out"
    return groups


def after_rejections(rejections: int, gate: Gate) -> str:
    """The effect of steps in a row without an accepted version, to be added to what training waits for; empty
    without such steps."""
    if not rejections:
        return ""
    steps = "the last step" if rejections == 1 else f"the last {rejections} steps"
    return f"; {steps} made no accepted version, so the learning rate is multiplied by {gate.lr_scale(rejections):.3g}"


def open_step(n: int, state: StepState, attempt: int) -> str:
    """Activity of an open step, e.g. `computing step 3 (attempt 1)`."""
    if state is StepState.CLAIMED and attempt:
        return f"computing step {n} (attempt {attempt})"
    return f"step {n} is {described(state)}"


def described(state: StepState) -> str:
    """An open step's state, for people."""
    return "claimed" if state is StepState.CLAIMED else "a candidate at the gate"


def _recipe(content: Any) -> tuple[Recipe | None, str | None]:
    if content is None:
        return None, "the policy has no recipe"
    try:
        return parse_stored_recipe(content), None
    except RecipeRejected as error:
        return None, unusable_recipe(error)


def unusable_recipe(error: RecipeRejected) -> str:
    """The message for a stored recipe that was valid when it was set and is not any more."""
    return f"its recipe cannot be used any more: {error}; set another with `clawloop recipe set`"


# Versions and events --------------------------------------------------------------------------------------------------
# Reads what a version was trained on, what happened to a policy, and what changed since the last look.

_BATCH = text(f"""
    SELECT m.place, m.dropped, m.without_hint, s.id AS sample_id, s.reward, j.id AS judgement, j.verdict, j.hint,
        j.shown_by, {HINT_SOURCE}, m.taught, t.id, t.session_id, t.version, t.messages_added, t.response,
        {token_count("t.response_ids")} AS tokens,
        p.source_turn_id, (
            SELECT count(*) FROM turns o
            WHERE o.session_id = t.session_id AND o.kind = 'main' AND o.id <= coalesce(p.source_turn_id, t.id)
        ) AS number
    FROM step_samples m JOIN samples s ON s.id = m.sample_id JOIN judgements j ON j.id = s.judgement_id
        JOIN turns t ON t.id = s.turn_id LEFT JOIN practice p ON p.turn_id = t.id
    WHERE m.policy = :policy AND m.step = :step ORDER BY m.place LIMIT :limit
""")


def _replies(order: str, version: str = "true") -> TextClause:
    return text(f"""
        SELECT t.started_at, t.session_id, t.episode_id IS NOT NULL AS in_episode, t.version, j.verdict,
            {token_count("t.response_ids")} AS tokens
        FROM (
            SELECT t.* FROM turns t JOIN sessions c ON c.id = t.session_id
            WHERE c.policy = :policy AND t.kind = 'main' AND t.response_ids IS NOT NULL
            ORDER BY t.id {order} LIMIT :limit) t
        LEFT JOIN LATERAL {newest_judgement("t.id")} j ON true
        WHERE {version} ORDER BY t.id
    """)


_NEWEST_REPLIES, _FIRST_BASE_REPLIES = _replies("DESC"), _replies("ASC", "t.version = 0")
_COUNTED_TURNS = 100_000
_OUTCOMES = text("""
    SELECT outcome, count(*) AS turns FROM (
        SELECT t.outcome FROM turns t JOIN sessions c ON c.id = t.session_id
        WHERE c.policy = :policy AND t.kind <> 'practice' ORDER BY t.id DESC LIMIT :limit) newest
    GROUP BY outcome
""")
_COUNTS = text("""
    SELECT (SELECT count(*) FROM sessions WHERE policy = :policy) AS sessions,
        (SELECT count(*) FROM samples WHERE policy = :policy AND state = 'quarantined') AS quarantined
""")
# Row by row what the page shows as it is now. The newest judgements are looked at for the decisions among them.
_MARK = text("""
    SELECT md5(concat_ws('|',
        (SELECT id FROM turns ORDER BY id DESC LIMIT 1), (SELECT id FROM judgements ORDER BY id DESC LIMIT 1),
        (SELECT id FROM samples ORDER BY id DESC LIMIT 1), (SELECT id FROM events ORDER BY id DESC LIMIT 1),
        (SELECT id FROM feedback ORDER BY id DESC LIMIT 1),
        (SELECT count(decided_at) FROM (SELECT decided_at FROM judgements ORDER BY id DESC LIMIT 100) j),
        (SELECT string_agg(concat_ws(',', id, head, active, epoch, pinned, paused_reason, recipe_hash, verdict_count),
            ';' ORDER BY id) FROM policies),
        (SELECT string_agg(concat_ws(',', policy, n, state, attempt, progress), ';' ORDER BY policy, n)
            FROM (SELECT * FROM steps ORDER BY claimed_at DESC LIMIT 20) s),
        (SELECT string_agg(concat_ws(',', id, state), ';' ORDER BY id)
            FROM (SELECT * FROM rollout_groups ORDER BY id DESC LIMIT 20) g),
        (SELECT string_agg(concat_ws(',', id, state, ending, reward, advantage), ';' ORDER BY id)
            FROM (SELECT * FROM episodes ORDER BY id DESC LIMIT 50) e),
        (SELECT string_agg(concat_ws(',', id, draining, problem), ';' ORDER BY id) FROM engines),
        (SELECT count(*) FROM engine_versions)))
""")


class PostgresTrainingBrowser(PostgresStore):
    """Satisfies `clawloop.operations.training.TrainingBrowser`."""

    @transaction
    async def batch(
        self, connection: AsyncConnection, policy: str, step: int, limit: int | None = None
    ) -> list[TrainedReply]:
        parameters = {"policy": storable(policy), "step": step, "limit": limit}
        rows = (await connection.execute(_BATCH, parameters)).all()
        reactions = await read_reactions(connection, [row.shown_by for row in rows if row.shown_by is not None])
        feedback = await read_feedback(connection, [TurnId(row.id) for row in rows])
        return [
            TrainedReply(
                sample_id=SampleId(row.sample_id),
                turn_id=TurnId(row.id),
                session_id=SessionId(row.session_id),
                number=row.number,
                answered_by=row.version,
                added=row.messages_added,
                response=row.response,
                reaction=reactions.get(row.shown_by, []),
                feedback=[given for given in feedback if given.turn_id == row.id],
                tokens=row.tokens,
                verdict=row.verdict,
                reward=row.reward,
                hints=TaughtHint.of(row.hint, row.hint_source, row.taught),
                dropped=row.dropped,
                without_hint=row.without_hint,
                practice_of=None if row.source_turn_id is None else TurnId(row.source_turn_id),
            )
            for row in opened(connection, rows, turns="id", judgements="judgement")
        ]

    @transaction
    async def events(self, connection: AsyncConnection, policy: str, limit: int) -> list[PolicyEvent]:
        newest = select(EventRow.kind, EventRow.detail, EventRow.at).where(EventRow.policy == storable(policy))
        rows = await connection.execute(newest.order_by(EventRow.id.desc()).limit(limit))
        return [PolicyEvent(row.kind, row.detail, row.at) for row in rows]

    @transaction
    async def replies(self, connection: AsyncConnection, policy: str, limit: int) -> list[ReplyFigures]:
        return await _read_replies(connection, _NEWEST_REPLIES, policy, limit)

    @transaction
    async def base_replies(self, connection: AsyncConnection, policy: str, limit: int) -> list[ReplyFigures]:
        await require_policy(connection, policy)
        return await _read_replies(connection, _FIRST_BASE_REPLIES, policy, limit)

    @transaction
    async def counts(self, connection: AsyncConnection, policy: str) -> Counts:
        await require_policy(connection, policy)
        parameters = {"policy": storable(policy)}
        outcomes = await connection.execute(_OUTCOMES, parameters | {"limit": _COUNTED_TURNS})
        row = (await connection.execute(_COUNTS, parameters)).one()
        return Counts(row.sessions, {outcome.outcome: outcome.turns for outcome in outcomes}, row.quarantined)

    @transaction
    async def mark(self, connection: AsyncConnection) -> str:
        found: str = (await connection.execute(_MARK)).scalar_one()
        return found


async def _read_replies(connection: AsyncConnection, query: TextClause, policy: str, limit: int) -> list[ReplyFigures]:
    rows = await connection.execute(query, {"policy": storable(policy), "limit": limit})
    return [
        ReplyFigures(row.started_at, SessionId(row.session_id), row.in_episode, row.version, row.verdict, row.tokens)
        for row in rows
    ]
