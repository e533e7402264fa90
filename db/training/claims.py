"""Chooses the samples of a step: when the schedule lets it, the oldest fresh ones and whole groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.algorithms.rewards import is_stale, versions_apart
from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import TurnKind, TurnOutcome
from clawloop.core.errors import ContentUnreadable
from clawloop.core.ids import SampleId
from clawloop.core.recipes.recipe import Recipe
from clawloop.core.recipes.schedule import CHAT_MINUTES, Closed, closed_by, day_begin
from clawloop.core.samples.decision import is_correction, nothing_to_correct
from db.content import token_count
from db.encryption.columns import opened
from db.tables import VersionRow
from db.training.policies import read_parents, version_refs, versions_of_other_shape
from db.training.samples import RECIPE_CHANGED, SAMPLE_COLUMNS, end_samples, needs_version, sample_fault

# Schedule -------------------------------------------------------------------------------------------------------------
# Reads what a recipe's schedule depends on, in the caller's transaction.

# A reply that takes longer is cut by the gateway's own limits.
_LONGEST_REPLY = timedelta(hours=1)
# Ids of turns begin with the time at which the turn began, so their index serves for times.
_CHAT_P95 = text("""
    SELECT percentile_disc(0.95) WITHIN GROUP (ORDER BY extract(epoch FROM finished_at - started_at))
    FROM turns WHERE id >= :first AND finished_at >= :since AND status IN ('complete', 'length')
        AND kind = 'main' AND episode_id IS NULL
""")
# The training workflow looks again this often; the sweep decides once a minute.
_RECHECK_SECONDS = 60.0


def closed_by_canary(canary: int | None, pinned: int | None) -> Closed | None:
    """No batch is claimed while a canary is open, so that nothing is trained from what may be rolled back."""
    if canary is None:
        return None
    if pinned is not None:
        why = f"version {canary} is a canary that no conversation gets while version {pinned} is pinned"
        return Closed(f"{why}; `clawloop policy pin --none` goes on with it", _RECHECK_SECONDS)
    return Closed(f"version {canary} is a canary, and its verdicts have not decided yet", _RECHECK_SECONDS)


async def read_closed(connection: AsyncConnection, policy: str, recipe: Recipe) -> Closed | None:
    """The reason that the policy's schedule lets no batch be claimed now; None if it lets one."""
    schedule = recipe.train.schedule
    if schedule is None:
        return None
    now = (await connection.execute(select(func.now()))).scalar_one()
    made, chat_p95 = 0, None
    if schedule.versions_a_day:
        today = VersionRow.created_at >= day_begin(schedule, now)
        # The version that a policy began from does not count as made by it.
        begun = (VersionRow.origin_policy.is_(None), VersionRow.lora_rank.is_(None))
        own = (VersionRow.policy == policy, VersionRow.n > 0, *begun)
        count = select(func.count()).where(*own, today)
        made = (await connection.execute(count)).scalar_one()
    if schedule.chat_seconds:
        since = now - timedelta(minutes=CHAT_MINUTES)
        parameters = {"first": first_id(since - _LONGEST_REPLY), "since": since}
        found = (await connection.execute(_CHAT_P95, parameters)).scalar_one()
        chat_p95 = None if found is None else float(found)
    return closed_by(schedule, now, made, chat_p95)


def first_id(moment: datetime) -> UUID:
    """No turn that began later has a smaller id: UUIDv7 begins with its milliseconds."""
    return UUID(int=int(moment.timestamp() * 1000) << 80)


# Samples --------------------------------------------------------------------------------------------------------------
# Chooses the samples of a step: the oldest fresh ones it can learn from, those of users before practised ones; the
# others expire, with the reason.
#
# A step learns from chats or from rollout groups (below), whichever has waited longer. Works
# in the caller's transaction, which must hold the policy's lock. Lengths are checked in SQL; tokens are decoded once,
# when the batch is read.

# A claim examines this many samples at most, so that it ends within its limit however many wait: expiring one takes
# 0.1 ms.
MAX_EXAMINED = 10_000
_CHUNK = 500

# Locking both sample and turn avoids deadlocks with judging and closing; NO KEY UPDATE lets a new turn refer to its
# parent. `parent_tokens` trusts the parent's `prompt_shared`: damage further up is found when the batch is read.
CLAIM_COLUMNS = f"""
    SELECT {SAMPLE_COLUMNS}, t.kind, t.group_id, s.reward, s.rollout_group_id,
        now() - s.created_at AS age, r.signal_hash, t.parent_turn_id, (
        SELECT coalesce(p.prompt_shared, 0) + coalesce({token_count("p.prompt_ids")}, 0)
            + coalesce({token_count("p.response_ids")}, 0)
        FROM turns p WHERE p.id = t.parent_turn_id) AS parent_tokens
    FROM samples s JOIN turns t ON t.id = s.turn_id JOIN judgements j ON j.id = s.judgement_id
        JOIN recipes r ON r.hash = j.recipe_hash
"""
# Two statements, as PostgreSQL estimates each: with the kind as a parameter it reads all turns.
_FRESH, _PRACTISED = (
    text(f"""{CLAIM_COLUMNS}
    WHERE s.policy = :policy AND s.state = 'fresh' AND s.rollout_group_id IS NULL AND s.id > :after AND {of_kind}
    ORDER BY s.id LIMIT :limit FOR NO KEY UPDATE OF s, t SKIP LOCKED
""")
    for of_kind in ("t.kind <> 'practice'", "EXISTS (SELECT FROM practice p WHERE p.turn_id = s.turn_id)")
)
_REST_OF_GROUPS = text(f"""{CLAIM_COLUMNS}
    WHERE s.policy = :policy AND s.state = 'fresh' AND t.group_id = ANY(:groups) AND s.id <> ALL(:chosen)
    ORDER BY s.id FOR NO KEY UPDATE OF s, t SKIP LOCKED
""")
_GROUP_SIZES = text("""
    SELECT t.group_id, count(*) AS size FROM samples s JOIN turns t ON t.id = s.turn_id
    WHERE s.policy = :policy AND s.state = 'fresh' AND t.group_id = ANY(:groups) GROUP BY t.group_id
""")
_FIRST = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True, slots=True)
class Chosen:
    """
    Args:
        samples: the step's samples; empty if it has to wait.
        reason: how many the step could take, of how many.
        full: whether these are as many as a batch has.
        first: the oldest sample; None without one.
    """

    samples: list[SampleId]
    reason: str
    full: bool
    first: SampleId | None


async def choose_samples(connection: AsyncConnection, policy: str, recipe: Recipe, head: int) -> Chosen:
    """A full batch, or a smaller one whose oldest sample has waited long enough, or none.

    Where the recipe compares groups, a batch may be larger by the rest of its last group.
    """
    batch_samples = recipe.train.batch_samples
    eligibility = await Eligibility.of(connection, policy, recipe, head)
    usable: list[Any] = []
    for fresh in (_FRESH, _PRACTISED):
        after, examined, limit = _FIRST, 0, max(2 * batch_samples, 32)
        while len(usable) < batch_samples and examined < MAX_EXAMINED:
            parameters = {"policy": policy, "after": after, "limit": limit}
            rows = opened(connection, await connection.execute(fresh, parameters), turns="turn_id")
            usable += await expire_unusable(connection, eligibility, rows)
            while len(usable) >= batch_samples and (why := eligibility.nothing_to_correct(usable[:batch_samples])):
                corrections = await _expire_praised(connection, eligibility, usable[:batch_samples], why)
                usable = corrections + usable[batch_samples:]
            if len(rows) < limit:
                break
            after, examined, limit = str(rows[-1].id), examined + len(rows), _CHUNK
    usable = usable[:batch_samples]
    if recipe.signal.reward == "group":
        usable = await _complete_groups(connection, eligibility, policy, usable)
    full = len(usable) >= batch_samples
    if not full and _has_waited(usable, recipe) and (why := eligibility.nothing_to_correct(usable)):
        usable = await _expire_praised(connection, eligibility, usable, why)
    return choice(usable, f"{len(usable)} of {batch_samples} samples", recipe, full=full)


async def expire_practised(connection: AsyncConnection, policy: str, recipe: Recipe, head: int) -> None:
    """End the practice samples that wait and that no step can take any more. Works as a claim does."""
    parameters = {"policy": policy, "after": _FIRST, "limit": MAX_EXAMINED}
    rows = opened(connection, await connection.execute(_PRACTISED, parameters), turns="turn_id")
    await expire_unusable(connection, await Eligibility.of(connection, policy, recipe, head), rows)


async def _expire_praised(
    connection: AsyncConnection, eligibility: Eligibility, batch: Sequence[Any], why: str
) -> list[Any]:
    """Return the batch's samples that correct something or are practised, and expire its other samples.

    If they waited instead, a policy that does well would gather praise without end, and learn from old praise once
    somebody complains.
    """
    praised = [row for row in _of_users(batch) if not eligibility.corrects(row)]
    expired = {SampleId(row.id): f"{why} (train.corrected_share)" for row in praised}
    await end_samples(connection, expired, SampleState.EXPIRED, TurnOutcome.EXPIRED)
    return [row for row in batch if row not in praised]


def _of_users(batch: Sequence[Any]) -> list[Any]:
    """The batch without practised samples: no user saw their replies, to correct or praise them."""
    return [row for row in batch if row.kind != TurnKind.PRACTICE]


def choice(usable: Sequence[Any], reason: str, recipe: Recipe, *, full: bool) -> Chosen:
    """The usable rows, if they are a full batch or the oldest has waited long enough."""
    samples = [SampleId(row.id) for row in usable] if full or _has_waited(usable, recipe) else []
    return Chosen(samples, reason, full, min((SampleId(row.id) for row in usable), default=None))


def _has_waited(usable: Sequence[Any], recipe: Recipe) -> bool:
    return any(row.age >= timedelta(hours=recipe.train.max_wait_hours) for row in usable)


async def expire_unusable(connection: AsyncConnection, eligibility: Eligibility, rows: Sequence[Any]) -> list[Any]:
    """The rows a step can take; the samples of the others expire."""
    expired = {SampleId(row.id): why for row in rows if (why := eligibility.fault(row)) is not None}
    await end_samples(connection, expired, SampleState.EXPIRED, TurnOutcome.EXPIRED)
    return [row for row in rows if row.id not in expired]


async def _complete_groups(
    connection: AsyncConnection, eligibility: Eligibility, policy: str, usable: list[Any]
) -> list[Any]:
    """Add the rest of each group; remove groups of which another transaction has locked a turn."""
    groups = {row.group_id for row in usable if row.group_id is not None}
    if not groups:
        return usable
    parameters = {"policy": policy, "groups": list(groups)}
    rest = await connection.execute(_REST_OF_GROUPS, parameters | {"chosen": [row.id for row in usable]})
    others = opened(connection, rest, turns="turn_id")
    rows = [*usable, *await expire_unusable(connection, eligibility, others)]
    counts = Counter(row.group_id for row in rows)
    sizes = {row.group_id: row.size for row in await connection.execute(_GROUP_SIZES, parameters)}
    return [row for row in rows if row.group_id is None or counts[row.group_id] == sizes[row.group_id]]


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Decides which samples a step from `head` can learn from.

    Args:
        parents: version → parent.
        readable: versions whose files exist and fit the recipe's LoRA.
    """

    recipe: Recipe
    head: int
    parents: dict[int, int]
    readable: frozenset[int]
    apart: dict[int, int] = field(default_factory=dict)  # cache of `apart_from_head`

    @classmethod
    async def of(cls, connection: AsyncConnection, policy: str, recipe: Recipe, head: int) -> Eligibility:
        parents = await read_parents(connection, policy)
        readable = await version_refs(connection, policy, list(parents))
        other = await versions_of_other_shape(connection, policy, recipe.train.lora)
        return cls(recipe, head, parents, frozenset(readable) - other)

    def fault(self, row: Any) -> str | None:
        """The reason that the sample expires; None if the step can take it."""
        try:
            sampling = row.sampling
        except ContentUnreadable as error:
            return f"turn {row.turn_id}: {error}"
        train = self.recipe.train
        if row.outcome == TurnOutcome.ERASED:
            return "its turn was erased"
        if row.signal_hash != self.recipe.signal.hash:
            return RECIPE_CHANGED
        if row.version != 0 and row.version not in self.parents:
            return f"version {row.version}, which answered, is not known"
        apart = self.apart_from_head(row.version)
        # A rollout group is stale as a whole, by its oldest turn.
        bound = train.staleness_versions if row.rollout_group_id is None else train.group_staleness_versions
        if is_stale(apart, bound=bound, explicit=row.explicit):
            return f"stale: {apart} versions apart, bound {bound}"
        by_reward = bool(row.reward) and train.uses_rewards
        by_hint = row.hinted_tokens is not None and train.uses_hints
        if not by_reward and not by_hint:
            return "neither a verdict nor a hint that this recipe learns from"
        if not by_reward and needs_version(train, row.version, self.head) and row.version not in self.readable:
            return f"version {row.version}, which answered, is gone: its hint cannot be read"
        return sample_fault(row, known_prompt_tokens(row), sampling)

    def corrects(self, row: Any) -> bool:
        return is_correction(self.recipe, row.reward, hinted=row.hinted_tokens is not None)

    def nothing_to_correct(self, batch: Sequence[Any]) -> str | None:
        """The reason why a batch only praises what is so; None if enough of its samples of users correct something."""
        return nothing_to_correct(
            self.recipe, [(row.reward, row.hinted_tokens is not None) for row in _of_users(batch)]
        )

    def apart_from_head(self, version: int) -> int:
        """Number of steps between the version and the head."""
        if version not in self.apart:
            self.apart[version] = versions_apart(version, self.head, self.parents)
        return self.apart[version]


def known_prompt_tokens(row: Any) -> int:
    """Length of a turn's prompt, as far as the claim's statement sees its parent.

    A parent that a late turn became while the claim waited for the row's lock is not visible to the statement, and its
    `parent_tokens` is None. The turn's own columns are then trusted; the batch is checked again when it is read.
    """
    if row.parent_turn_id is not None and row.parent_tokens is None:
        return int(row.prompt_shared + row.prompt_added)
    return int(min(row.prompt_shared, row.parent_tokens or 0) + row.prompt_added)


# Groups ---------------------------------------------------------------------------------------------------------------
# Chooses the rollout groups of a step: the oldest whole ones it can learn from.
#
# Works in the caller's transaction, which must hold the policy's lock.

# Group ids sort by the time the group was made.
_FRESH_GROUPS = text("""
    SELECT rollout_group_id AS id, count(*) AS size FROM samples
    WHERE policy = :policy AND state = 'fresh' AND rollout_group_id IS NOT NULL
        AND (CAST(:after AS uuid) IS NULL OR rollout_group_id > :after)
    GROUP BY rollout_group_id ORDER BY rollout_group_id LIMIT :limit
""")
_OF_GROUPS = text(f"""{CLAIM_COLUMNS}
    WHERE s.policy = :policy AND s.state = 'fresh' AND s.rollout_group_id = ANY(:groups)
    ORDER BY s.rollout_group_id, s.id FOR NO KEY UPDATE OF s, t SKIP LOCKED
""")


async def choose_groups(connection: AsyncConnection, policy: str, recipe: Recipe, head: int) -> Chosen:
    """All samples of `batch_groups` groups, or of fewer whose oldest sample has waited long enough, or none."""
    wanted = recipe.train.batch_groups
    eligibility = await Eligibility.of(connection, policy, recipe, head)
    usable: dict[UUID, list[Any]] = {}
    after: UUID | None = None
    while len(usable) < wanted:
        parameters = {"policy": policy, "after": after, "limit": wanted}
        sizes = {row.id: row.size for row in await connection.execute(_FRESH_GROUPS, parameters)}
        if sizes:
            usable |= await _usable_groups(connection, eligibility, policy, sizes)
        if len(sizes) < wanted:
            break
        after = max(sizes)
    groups = sorted(usable)[:wanted]
    rows = [row for group in groups for row in usable[group]]
    return choice(rows, f"{len(groups)} of {wanted} rollout groups", recipe, full=len(groups) >= wanted)


async def _usable_groups(
    connection: AsyncConnection, eligibility: Eligibility, policy: str, sizes: dict[UUID, int]
) -> dict[UUID, list[Any]]:
    """The groups a step can take, without those of which another transaction has locked a turn."""
    rows = await connection.execute(_OF_GROUPS, {"policy": policy, "groups": list(sizes)})
    found = opened(connection, rows, turns="turn_id")
    counts = Counter(row.rollout_group_id for row in found)
    whole = [row for row in found if counts[row.rollout_group_id] == sizes[row.rollout_group_id]]
    fresh = await _expire_stale_groups(connection, eligibility, whole)
    groups: defaultdict[UUID, list[Any]] = defaultdict(list)
    for row in await expire_unusable(connection, eligibility, fresh):
        groups[row.rollout_group_id].append(row)
    return dict(groups)


async def _expire_stale_groups(connection: AsyncConnection, eligibility: Eligibility, rows: list[Any]) -> list[Any]:
    """The rows without those of stale groups: a group is as old as its oldest turn."""
    bound = eligibility.recipe.train.group_staleness_versions
    oldest: dict[UUID, int] = {}
    for row in rows:
        if row.version == 0 or row.version in eligibility.parents:
            apart = eligibility.apart_from_head(row.version)
            oldest[row.rollout_group_id] = max(apart, oldest.get(row.rollout_group_id, 0))
    stale = {
        SampleId(row.id): f"stale: its group's oldest turn is {apart} versions apart, bound {bound}"
        for row in rows
        if (apart := oldest.get(row.rollout_group_id, 0)) > bound
    }
    await end_samples(connection, stale, SampleState.EXPIRED, TurnOutcome.EXPIRED)
    return [row for row in rows if row.id not in stale]
