"""Which samples a step takes: the oldest fresh ones it can learn from; the others expire, with the reason.

Knows nothing about steps' rows. Works in the caller's transaction, which must hold the policy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.algorithms.staleness import is_stale, versions_apart
from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import TurnOutcome
from clawloop.errors import RecordUnusable
from clawloop.ids import SampleId
from clawloop.recipes.recipe import Recipe
from db.training.batches import EXPLICIT, needs_version, read_samples
from db.training.lineage import of_other_shape, read_parents, version_refs
from db.training.samples import RECIPE_CHANGED, end_samples
from db.turns.conversation_cache import ConversationCache

# One claim looks at so many samples at most, so that it ends within its limit whatever has piled up: a sample that
# expires takes 0.1 ms, one that is taken 2 ms.
MOST_LOOKED_AT = 10_000
_CHUNK = 500

# Both rows are ours then, so nothing that judges or closes can wait for us while we wait for it. Turns that are
# being continued are only referred to, which NO KEY UPDATE lets pass.
_COLUMNS = f"""
    SELECT s.id, t.group_id, s.reward, s.hinted_prompt_ids IS NOT NULL AS hinted, now() - s.created_at AS age,
        t.version, t.outcome, r.signal_hash, {EXPLICIT} AS explicit
    FROM samples s JOIN turns t ON t.id = s.turn_id JOIN judgements j ON j.id = s.judgement_id
        JOIN recipes r ON r.hash = j.recipe_hash
"""
_FRESH = text(f"""{_COLUMNS}
    WHERE s.policy = :policy AND s.state = 'fresh' AND s.id > :after
    ORDER BY s.id LIMIT :limit FOR NO KEY UPDATE OF s, t SKIP LOCKED
""")
_REST = text(f"""{_COLUMNS}
    WHERE s.policy = :policy AND s.state = 'fresh' AND t.group_id = ANY(:groups) AND s.id <> ALL(:known)
    ORDER BY s.id FOR NO KEY UPDATE OF s, t SKIP LOCKED
""")
_SIZES = text("""
    SELECT t.group_id, count(*) AS size FROM samples s JOIN turns t ON t.id = s.turn_id
    WHERE s.policy = :policy AND s.state = 'fresh' AND t.group_id = ANY(:groups) GROUP BY t.group_id
""")
_FIRST = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True, slots=True)
class Chosen:
    """
    Args:
        samples: what the step takes; empty if it has to wait.
        found: how many it could take.
    """

    samples: list[SampleId]
    found: int


async def choose_samples(
    connection: AsyncConnection, conversations: ConversationCache, policy: str, recipe: Recipe, head: int
) -> Chosen:
    """A full batch, or a smaller one whose oldest sample has waited long enough, or none.

    Where the recipe compares groups a batch may be larger by the rest of its last group.
    """
    wanted = recipe.train.batch_samples
    bounds = await _Bounds.of(connection, policy, recipe, head)
    usable: list[Any] = []
    after, looked_at, limit = _FIRST, 0, max(2 * wanted, 32)
    while len(usable) < wanted and looked_at < MOST_LOOKED_AT:
        asked = {"policy": policy, "after": after, "limit": limit}
        rows = (await connection.execute(_FRESH, asked)).all()
        expired = {SampleId(row.id): why for row in rows if (why := bounds.fault(row)) is not None}
        good = [row for row in rows if row.id not in expired]
        while good and len(usable) < wanted:
            missing = wanted - len(usable)
            part, good = good[:missing], good[missing:]
            read = await read_samples(connection, conversations, [SampleId(row.id) for row in part])
            expired |= {sample: str(found) for sample, found in read.items() if isinstance(found, RecordUnusable)}
            usable += [row for row in part if row.id not in expired]
        await end_samples(connection, expired, SampleState.EXPIRED, TurnOutcome.EXPIRED)
        if len(rows) < limit:
            break
        after, looked_at, limit = str(rows[-1].id), looked_at + len(rows), _CHUNK
    if recipe.signal.reward == "group":
        usable = await _whole_groups(connection, conversations, bounds, policy, usable)
    waited = bool(usable) and usable[0].age >= timedelta(hours=recipe.train.max_wait_hours)
    taken = usable if len(usable) >= wanted or waited else []
    return Chosen([SampleId(row.id) for row in taken], len(usable))


async def _whole_groups(
    connection: AsyncConnection, conversations: ConversationCache, bounds: _Bounds, policy: str, usable: list[Any]
) -> list[Any]:
    """With the rest of each group; without groups of which somebody holds a turn at this moment."""
    groups = {row.group_id for row in usable if row.group_id is not None}
    if not groups:
        return usable
    asked = {"policy": policy, "groups": list(groups)}
    rest = (await connection.execute(_REST, asked | {"known": [row.id for row in usable]})).all()
    expired = {SampleId(row.id): why for row in rest if (why := bounds.fault(row)) is not None}
    good = [row for row in rest if row.id not in expired]
    read = await read_samples(connection, conversations, [SampleId(row.id) for row in good])
    expired |= {sample: str(found) for sample, found in read.items() if isinstance(found, RecordUnusable)}
    await end_samples(connection, expired, SampleState.EXPIRED, TurnOutcome.EXPIRED)
    together = [*usable, *(row for row in good if row.id not in expired)]
    here = Counter(row.group_id for row in together)
    sizes = {row.group_id: row.size for row in await connection.execute(_SIZES, asked)}
    return [row for row in together if row.group_id is None or here[row.group_id] == sizes[row.group_id]]


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What a step from `head` can learn from."""

    recipe: Recipe
    head: int
    parents: dict[int, int]
    readable: frozenset[int]
    apart: dict[int, int] = field(default_factory=dict)  # as far as it was asked for

    @classmethod
    async def of(cls, connection: AsyncConnection, policy: str, recipe: Recipe, head: int) -> _Bounds:
        parents = await read_parents(connection, policy)
        readable = await version_refs(connection, policy, list(parents))
        other = await of_other_shape(connection, policy, recipe.train.lora)
        return cls(recipe, head, parents, frozenset(readable) - other)

    def fault(self, row: Any) -> str | None:
        """Why the sample expires; None if the step can take it."""
        train = self.recipe.train
        if row.outcome == TurnOutcome.ERASED:
            return "its turn was erased"
        if row.signal_hash != self.recipe.signal.hash:
            return RECIPE_CHANGED
        if row.version != 0 and row.version not in self.parents:
            return f"version {row.version}, which answered, is not known"
        apart = self._apart(row.version)
        if is_stale(apart, bound=train.staleness_versions, explicit=row.explicit):
            return f"stale: {apart} versions apart, bound {train.staleness_versions}"
        by_reward = bool(row.reward) and train.uses_rewards
        by_hint = row.hinted and train.uses_hints
        if not by_reward and not by_hint:
            return "neither a verdict nor a hint that this recipe learns from"
        if not by_reward and needs_version(train, row.version, self.head) and row.version not in self.readable:
            return f"version {row.version}, which would read its hint, is gone"
        return None

    def _apart(self, version: int) -> int:
        if version not in self.apart:
            self.apart[version] = versions_apart(version, self.head, self.parents)
        return self.apart[version]
