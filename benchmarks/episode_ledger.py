"""Episodes of rollout groups since a moment, read from PostgreSQL: losses and work done twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from clawloop.core.contracts.episodes import Ending

_PLACES = """
    SELECT wanted AS places, wanted - count(*) FILTER (WHERE scored > 0) AS lost,
        count(*) FILTER (WHERE finished > 1 OR most_sessions > 1) AS doubled, sum(attempts) AS attempts
    FROM (
        SELECT e.group_id, e.place, count(*) AS attempts,
            count(*) FILTER (WHERE e.state = 'scored') AS scored,
            count(*) FILTER (WHERE e.state IN ('ended', 'scored', 'unscored')) AS finished,
            max((SELECT count(DISTINCT t.session_id) FROM turns t WHERE t.episode_id = e.id)) AS most_sessions
        FROM episodes e JOIN rollout_groups g ON g.id = e.group_id WHERE g.created_at >= %(since)s GROUP BY 1, 2) p,
        (SELECT sum(size) AS wanted FROM rollout_groups WHERE created_at >= %(since)s) w
    GROUP BY wanted
"""
# A request that was sent again is another turn with as many messages.
_SCORED = """
    SELECT g.environment, e.ending, (
            SELECT count(DISTINCT t.messages_kept + json_array_length(t.messages_added)) FROM turns t
            WHERE t.episode_id = e.id AND t.kind = 'main' AND t.status = 'complete') AS replies
    FROM episodes e JOIN rollout_groups g ON g.id = e.group_id
    WHERE e.state = 'scored' AND g.created_at >= %(since)s
"""


@dataclass(frozen=True, slots=True)
class Scored:
    """An episode with a reward.

    Args:
        completed: its agent says that it is done, and so had all its replies.
        replies: those that are stored as main turns.
    """

    environment: str
    completed: bool
    replies: int


def places_since(connection: psycopg.Connection[Any], since: datetime) -> dict[str, int]:
    """Places of the groups and attempts at them; places without a reward, and those with two that ended."""
    row = connection.execute(_PLACES, {"since": since}).fetchone()
    assert row is not None
    places, lost, doubled, attempts = map(int, row)
    return {"places": places, "attempts": attempts, "lost": lost, "doubled": doubled}


def scored_since(connection: psycopg.Connection[Any], since: datetime) -> list[Scored]:
    rows = connection.execute(_SCORED, {"since": since}).fetchall()
    return [Scored(environment, ending == Ending.COMPLETED, replies) for environment, ending, replies in rows]


def turns_lost(scored: Sequence[Scored], replies: Mapping[str, int]) -> int:
    """Number of replies that agents received and that are not stored.

    Args:
        replies: by environment, the number of replies that an agent receives before it is done.
    """
    return sum(max(0, replies[one.environment] - one.replies) for one in scored if one.completed)


def count_by_environment(scored: Sequence[Scored], environments: Collection[str]) -> dict[str, int]:
    """Number of episodes of each environment; 0 tells that none was seen."""
    counts = Counter(one.environment for one in scored)
    return {name: counts[name] for name in environments}
