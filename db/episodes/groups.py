"""Rollout groups and the attempts of their episodes in PostgreSQL."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.episodes import (
    Ending,
    EpisodeBegun,
    EpisodeEnd,
    EpisodeScore,
    EpisodeState,
    EpisodeView,
    GroupBegun,
    GroupResult,
    GroupState,
    GroupView,
    NewGroup,
)
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.turns import TurnKind, TurnOutcome
from clawloop.core.episodes.keys import KEY_LIFETIME, EpisodeKey, sign
from clawloop.core.episodes.kinds import KEY_LEAST_LEFT
from clawloop.core.errors import AmbiguousId, EpisodeUnusable, NotFound, RecordUnusable
from clawloop.core.ids import EpisodeId, JudgementId, RolloutGroupId, SessionId, TurnId, ids_beginning, new_episode_id
from clawloop.core.judging.voting import Verdict
from clawloop.core.samples.rollouts import judges_episodes
from db.content import storable, token_count
from db.database import PostgresStore, transaction
from db.episodes.rollouts import lock_rollouts_of, made_room
from db.episodes.settling import end_late_turns, recipe_if_any, settle_group
from db.serving.keys import signing_secret
from db.tables import ApiKeyRow, EpisodeRow, JudgementRow, PolicyRow, RolloutGroupRow, TurnRow
from db.training.policies import require_policy

# Attempts -------------------------------------------------------------------------------------------------------------
# Begins, ends and scores episodes in PostgreSQL, inside the caller's transaction.

# The one at its place that is verified: no other attempt follows.
_ENDED = (EpisodeState.ENDED, EpisodeState.SCORED, EpisodeState.UNSCORED)


async def lock_group(connection: AsyncConnection, group: RolloutGroupId) -> Any:
    """The group's row, locked.

    Raises:
        RecordUnusable: there is no such group.
    """
    query = select(RolloutGroupRow.__table__).where(RolloutGroupRow.id == group).with_for_update()
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise RecordUnusable(f"there is no rollout group {group}")
    return row


async def begin_places(
    connection: AsyncConnection, row: Any, places: Sequence[int], attempt: int, lifetime: timedelta
) -> list[EpisodeBegun]:
    """Begin an episode at each place, as `activities.episodes.EpisodeStore.begin_episode` does at one.

    Args:
        row: the group's, locked.
    """
    group = RolloutGroupId(row.id)
    query = select(EpisodeRow.__table__).where(EpisodeRow.group_id == group, EpisodeRow.place.in_(places))
    earlier: defaultdict[int, list[Any]] = defaultdict(list)
    for episode in await connection.execute(query):
        earlier[episode.place].append(episode)
    begun = {
        place: _begun(episode)
        for place, attempts in earlier.items()
        for episode in attempts
        if episode.attempt == attempt or episode.state in _ENDED
    }
    missing = [place for place in places if place not in begun]
    if missing:
        await _require_open(connection, row, max(missing))
        for place in missing:
            for lost in earlier[place]:
                await _abandon(connection, EpisodeId(lost.id), f"attempt {attempt} took its place")
        begun |= await _insert(connection, row, missing, attempt, lifetime)
    return [begun[place] for place in places]


async def _end(connection: AsyncConnection, end: EpisodeEnd) -> str | None:
    if end.ending is Ending.INFRASTRUCTURE:
        await _abandon(connection, end.id, end.reason, end.ending)
        await _note_artifact(connection, end)
        return None
    # Locked first, in the same order as when all groups of a policy are ended: rollouts, then their episodes.
    policy = await lock_rollouts_of(connection, end.id)
    running = update(EpisodeRow).where(EpisodeRow.id == end.id, EpisodeRow.state == EpisodeState.RUNNING)
    values = {
        "state": EpisodeState.ENDED,
        "ending": end.ending,
        "reason": storable(end.reason) or None,
        "artifact_sha256": None if end.artifact_sha256 is None else bytes.fromhex(end.artifact_sha256),
        "ended_at": func.now(),
    }
    if not (await connection.execute(running.values(values))).rowcount:
        await _note_artifact(connection, end)
    await _revoke_key(connection, end.id)
    return policy if policy is not None and await made_room(connection, policy) else None


async def _score(connection: AsyncConnection, score: EpisodeScore) -> None:
    episode, reward = score.episode, score.reward
    if reward is not None and not 0 <= reward <= 1:  # NaN is not, either
        raise EpisodeUnusable(f"episode {episode}: reward {reward:g} is not between 0 and 1")
    ended = update(EpisodeRow).where(EpisodeRow.id == episode, EpisodeRow.state == EpisodeState.ENDED)
    state = EpisodeState.UNSCORED if reward is None else EpisodeState.SCORED
    values = {"state": state, "reward": reward, "reason": storable(score.reason) or EpisodeRow.reason}
    await connection.execute(ended.values(values))


async def _require_open(connection: AsyncConnection, row: Any, place: int) -> None:
    if row.state != GroupState.OPEN or place >= row.size:
        raise RecordUnusable(f"rollout group {row.id} is {row.state} and has {row.size} episodes")
    if await connection.scalar(select(PolicyRow.retired_at).where(PolicyRow.id == row.policy)) is not None:
        raise RecordUnusable(f"the policy {row.policy!r} was retired: it begins no episode")


async def _insert(
    connection: AsyncConnection, row: Any, places: Sequence[int], attempt: int, lifetime: timedelta
) -> dict[int, EpisodeBegun]:
    """New episodes with their keys, by place."""
    group, secret = RolloutGroupId(row.id), await signing_secret(connection)
    # In whole seconds, as the token holds it.
    expires_at = (datetime.now(UTC) + lifetime).replace(microsecond=0)
    begun = {place: EpisodeBegun(new_episode_id(), group, place, attempt) for place in places}
    keys = []
    for new in begun.values():
        token = sign(EpisodeKey(new.id, row.policy, expires_at), secret)
        keys.append(
            {
                "id": new.id,
                "policy": row.policy,
                "name": f"episode {new.id}",
                "prefix": token.partition(".")[0],
                "secret_sha256": hashlib.sha256(token.encode()).digest(),
                "scopes": [Scope.CHAT],
                "expires_at": expires_at,
                "episode_id": new.id,
            }
        )
    state = EpisodeState.RUNNING
    episodes = [
        {"id": new.id, "group_id": group, "place": new.place, "attempt": attempt, "state": state}
        for new in begun.values()
    ]
    await connection.execute(insert(EpisodeRow), episodes)
    await connection.execute(insert(ApiKeyRow), keys)
    return begun


def _begun(row: Any) -> EpisodeBegun:
    artifact = None if row.artifact_sha256 is None else row.artifact_sha256.hex()
    return EpisodeBegun(
        EpisodeId(row.id), RolloutGroupId(row.group_id), row.place, row.attempt, EpisodeState(row.state), artifact
    )


async def _abandon(connection: AsyncConnection, episode: EpisodeId, reason: str, ending: Ending | None = None) -> None:
    unfinished = update(EpisodeRow).where(
        EpisodeRow.id == episode, EpisodeRow.state.in_([EpisodeState.RUNNING, EpisodeState.ENDED])
    )
    values = {
        "state": EpisodeState.ABANDONED,
        "ending": EpisodeRow.ending if ending is None else ending,
        "reason": storable(reason),
        "ended_at": func.coalesce(EpisodeRow.ended_at, func.now()),
    }
    await connection.execute(unfinished.values(values))
    await _revoke_key(connection, episode)


async def _note_artifact(connection: AsyncConnection, end: EpisodeEnd) -> None:
    """Note an episode's artifact, also of an abandoned episode, so that the artifact is erased with the session."""
    if end.artifact_sha256 is not None:
        unknown = update(EpisodeRow).where(EpisodeRow.id == end.id, EpisodeRow.artifact_sha256.is_(None))
        await connection.execute(unknown.values(artifact_sha256=bytes.fromhex(end.artifact_sha256)))


async def _revoke_key(connection: AsyncConnection, episode: EpisodeId) -> None:
    valid = update(ApiKeyRow).where(ApiKeyRow.episode_id == episode, ApiKeyRow.revoked_at.is_(None))
    await connection.execute(valid.values(revoked_at=func.now()))


# Groups ---------------------------------------------------------------------------------------------------------------
# Rollout groups and their episodes in PostgreSQL.

_EPISODES = f"""
    SELECT e.*, g.policy, g.environment, g.task, counts.*
    FROM episodes e JOIN rollout_groups g ON g.id = e.group_id CROSS JOIN LATERAL (
        SELECT count(*) AS turns, coalesce(sum({token_count("t.response_ids")}), 0) AS tokens,
            count(*) FILTER (WHERE t.outcome = 'trained') AS trained
        FROM turns t WHERE t.episode_id = e.id AND t.kind = 'main') counts
"""
_SESSIONS = text("""
    SELECT episode_id, session_id FROM turns WHERE episode_id = ANY(:episodes)
    GROUP BY episode_id, session_id ORDER BY min(CAST(id AS text))
""")
_LIST = text(f"""{_EPISODES}
    WHERE (CAST(:policy AS text) IS NULL OR g.policy = :policy)
        AND (CAST(:group AS uuid) IS NULL OR e.group_id = :group)
        AND (CAST(:after AS uuid) IS NULL OR e.id < :after)
    ORDER BY e.id DESC LIMIT :limit
""")
_ONE = text(f"{_EPISODES} WHERE e.id = :episode")


class PostgresEpisodeStore(PostgresStore):
    """Implements `EpisodeStore` of `activities.episodes`; also keeps the keys and turns of episodes, and reads for
    people."""

    @transaction
    async def make_group(self, connection: AsyncConnection, group: NewGroup) -> None:
        values = {
            "id": group.id,
            "policy": group.policy,
            "environment": storable(group.environment),
            "task": storable(group.task),
            "size": group.size,
            "state": GroupState.OPEN,
        }
        await connection.execute(insert(RolloutGroupRow).values(values).on_conflict_do_nothing())

    @transaction
    async def begin_group(self, connection: AsyncConnection, group: RolloutGroupId, lifetime: timedelta) -> GroupBegun:
        row = await lock_group(connection, group)
        recipe = await recipe_if_any(connection, row.policy)
        judged = recipe is not None and judges_episodes(recipe.signal)
        state = GroupState(row.state)
        is_open = state is GroupState.OPEN
        begun = await begin_places(connection, row, range(row.size), 1, lifetime) if is_open else ()
        return GroupBegun(row.policy, row.environment, row.task, row.size, state, judged, begun)

    @transaction
    async def begin_episode(
        self, connection: AsyncConnection, group: RolloutGroupId, place: int, attempt: int, lifetime: timedelta
    ) -> EpisodeBegun:
        [begun] = await begin_places(connection, await lock_group(connection, group), [place], attempt, lifetime)
        return begun

    @transaction
    async def key_of(self, connection: AsyncConnection, episode: EpisodeId) -> str:
        valid = [ApiKeyRow.episode_id == episode, ApiKeyRow.revoked_at.is_(None)]
        query = select(ApiKeyRow.policy, ApiKeyRow.expires_at, func.now().label("now")).where(*valid)
        row = (await connection.execute(query.with_for_update())).one_or_none()
        if row is None:
            raise EpisodeUnusable(f"episode {episode} does not run")
        if await connection.scalar(select(TurnRow.id).where(TurnRow.episode_id == episode).limit(1)) is not None:
            raise EpisodeUnusable(f"episode {episode} has turns already: another agent ran")
        # The episode may have waited for hours until a worker had a place. An agent whose key expires while it runs
        # would fail, and the failure would count as the agent's own.
        ends = row.expires_at
        if ends < row.now + KEY_LEAST_LEFT:
            ends = (row.now + KEY_LIFETIME).replace(microsecond=0)
        token = sign(EpisodeKey(episode, row.policy, ends), await signing_secret(connection))
        # The key was not used yet, and the signing secret may have changed since the episode began.
        digest, prefix = hashlib.sha256(token.encode()).digest(), token.partition(".")[0]
        of_episode = update(ApiKeyRow).where(*valid)
        await connection.execute(of_episode.values(secret_sha256=digest, prefix=prefix, expires_at=ends))
        return token

    @transaction
    async def end_episode(self, connection: AsyncConnection, end: EpisodeEnd) -> str | None:
        policy = await _end(connection, end)
        if end.score is not None:
            await _score(connection, end.score)
        return policy

    @transaction
    async def score_episode(self, connection: AsyncConnection, score: EpisodeScore) -> None:
        await _score(connection, score)

    @transaction
    async def waiting_turns(self, connection: AsyncConnection, episode: EpisodeId) -> list[TurnId]:
        waiting = select(TurnRow.id).where(
            TurnRow.episode_id == episode, TurnRow.kind == TurnKind.MAIN, TurnRow.outcome == TurnOutcome.WAITING
        )
        return [TurnId(turn) for turn in await connection.scalars(waiting.order_by(TurnRow.id))]

    @transaction
    async def note_verdict(self, connection: AsyncConnection, judgement: JudgementId, verdict: Verdict) -> None:
        undecided = update(JudgementRow).where(JudgementRow.id == judgement, JudgementRow.decided_at.is_(None))
        values = {"verdict": verdict.verdict, "expected": verdict.expected, "verdict_why": storable(verdict.why)}
        await connection.execute(undecided.values(values))

    @transaction
    async def settle(self, connection: AsyncConnection, group: RolloutGroupId) -> tuple[GroupResult, str | None]:
        return await settle_group(connection, group)

    @transaction
    async def end_late_turns(self, connection: AsyncConnection) -> int:
        return await end_late_turns(connection)

    @transaction
    async def groups(
        self, connection: AsyncConnection, *, policy: str | None, after: RolloutGroupId | None, limit: int
    ) -> list[GroupView]:
        """Groups, newest first; `after` is the last of the previous page."""
        await require_policy(connection, policy)
        query = select(RolloutGroupRow.__table__).order_by(RolloutGroupRow.id.desc()).limit(limit)
        if policy is not None:
            query = query.where(RolloutGroupRow.policy == storable(policy))
        if after is not None:
            query = query.where(RolloutGroupRow.id < after)
        return [_group_view(row) for row in await connection.execute(query)]

    @transaction
    async def episodes(
        self,
        connection: AsyncConnection,
        *,
        policy: str | None = None,
        group: RolloutGroupId | None = None,
        after: EpisodeId | None = None,
        limit: int,
    ) -> list[EpisodeView]:
        """Episodes, newest first; `after` is the last of the previous page."""
        await require_policy(connection, policy)
        named = None if policy is None else storable(policy)
        parameters = {"policy": named, "group": group, "after": after, "limit": limit}
        return await _views(connection, (await connection.execute(_LIST, parameters)).all())

    @transaction
    async def episode(self, connection: AsyncConnection, episode: EpisodeId) -> EpisodeView | None:
        found = await _views(connection, (await connection.execute(_ONE, {"episode": episode})).all())
        return found[0] if found else None

    @transaction
    async def find_episode(self, connection: AsyncConnection, reference: str) -> EpisodeId:
        """The episode with this id or beginning of an id; `last` is the newest.

        Raises:
            NotFound, AmbiguousId
        """
        newest = select(EpisodeRow.id).order_by(EpisodeRow.id.desc()).limit(1)
        if reference == "last" and (last := await connection.scalar(newest)) is not None:
            return EpisodeId(last)
        return EpisodeId(await _find(connection, EpisodeRow, reference, "episode"))

    @transaction
    async def find_group(self, connection: AsyncConnection, reference: str) -> RolloutGroupId:
        """The rollout group with this id or beginning of an id.

        Raises:
            NotFound, AmbiguousId
        """
        return RolloutGroupId(await _find(connection, RolloutGroupRow, reference, "group"))


async def _find(
    connection: AsyncConnection, table: type[EpisodeRow | RolloutGroupRow], reference: str, field: str
) -> UUID:
    span = ids_beginning(reference)
    found: list[UUID] = []
    if span is not None:
        found = list(await connection.scalars(select(table.id).where(table.id.between(*span)).limit(2)))
    if not found:
        raise NotFound(
            f"there is no {field} {reference!r}",
            code="episode_not_found" if field == "episode" else "group_not_found",
            field=field,
        )
    if len(found) > 1:
        raise AmbiguousId(f"{reference!r} begins the id of several; give more of it", field=field)
    return found[0]


def _group_view(row: Any) -> GroupView:
    return GroupView(
        id=RolloutGroupId(row.id),
        policy=row.policy,
        environment=row.environment,
        task=row.task,
        size=row.size,
        state=GroupState(row.state),
        reason=row.reason,
        scored=row.scored,
        mean_reward=row.mean_reward,
        created_at=row.created_at,
        finished_at=row.finished_at,
    )


async def _views(connection: AsyncConnection, rows: Sequence[Any]) -> list[EpisodeView]:
    sessions: defaultdict[UUID, list[SessionId]] = defaultdict(list)
    for of_episode in await connection.execute(_SESSIONS, {"episodes": [row.id for row in rows]}):
        sessions[of_episode.episode_id].append(SessionId(of_episode.session_id))
    return [_episode_view(row, sessions[row.id]) for row in rows]


def _episode_view(row: Any, sessions: Sequence[SessionId]) -> EpisodeView:
    return EpisodeView(
        id=EpisodeId(row.id),
        group=RolloutGroupId(row.group_id),
        policy=row.policy,
        environment=row.environment,
        task=row.task,
        place=row.place,
        attempt=row.attempt,
        state=EpisodeState(row.state),
        ending=None if row.ending is None else Ending(row.ending),
        reward=row.reward,
        advantage=row.advantage,
        reason=row.reason,
        artifact_sha256=None if row.artifact_sha256 is None else row.artifact_sha256.hex(),
        turns=row.turns,
        tokens=int(row.tokens),
        trained=row.trained,
        started_at=row.started_at,
        ended_at=row.ended_at,
        sessions=sessions,
    )
