"""Begins, ends and scores episodes in PostgreSQL, inside the caller's transaction."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.episodes import REWARD_LIMIT, Ending, EpisodeBegun, EpisodeEnd, EpisodeState, GroupState
from clawloop.contracts.serving import Scope
from clawloop.episodes.keys import EpisodeKey, sign
from clawloop.errors import EpisodeUnusable, RecordUnusable
from clawloop.ids import EpisodeId, RolloutGroupId, new_episode_id
from db.episodes.room import lock_rollouts_of, made_room
from db.episodes.signing import signing_secret
from db.exact_json import storable
from db.tables import ApiKeyRow, EpisodeRow, PolicyRow, RolloutGroupRow

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
    """For each place what `activities.episodes.EpisodeStore.begin_episode` says.

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


async def end_episode(connection: AsyncConnection, end: EpisodeEnd) -> str | None:
    """See `activities.episodes.EpisodeStore.end_episode`."""
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


async def score_episode(connection: AsyncConnection, episode: EpisodeId, reward: float | None, reason: str) -> None:
    """See `activities.episodes.EpisodeStore.score_episode`."""
    if reward is not None and not math.isfinite(reward):
        raise EpisodeUnusable(f"episode {episode}: reward {reward} is not finite")
    if reward is not None and abs(reward) > REWARD_LIMIT:
        limits = f"between -{REWARD_LIMIT:g} and {REWARD_LIMIT:g}"
        raise EpisodeUnusable(f"episode {episode}: reward {reward:g} is not {limits}")
    ended = update(EpisodeRow).where(EpisodeRow.id == episode, EpisodeRow.state == EpisodeState.ENDED)
    state = EpisodeState.UNSCORED if reward is None else EpisodeState.SCORED
    values = {"state": state, "reward": reward, "reason": storable(reason) or EpisodeRow.reason}
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
