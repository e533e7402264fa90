"""Stored turns judged by another judge or recipe, compared; and votes compared with outcomes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from clawloop.core.contracts.answers import Rejudged
from clawloop.core.contracts.views import View
from clawloop.core.errors import JudgeUnavailable, RecipeRejected, StateConflict
from clawloop.core.ids import TurnId
from clawloop.core.judging.agreement import (
    Agreement,
    Pair,
    Precision,
    VotedTurn,
    agreement,
    by_version,
    precision_by_votes,
)
from clawloop.core.recipes.recipe import Recipe
from clawloop.operations.sessions import SessionOperations
from clawloop.operations.training import TrainingStore

# Another judge --------------------------------------------------------------------------------------------------------
# Judges stored turns by another judge or recipe, and compares; nothing changes unless that is asked for.
#
# A few turns a call, so that chats, which share the engines, are not disturbed, and each is stored at once: the next
# call goes on where this one, or one that failed, ended.

# Turns that are judged at once: their votes are one request each, beside the chats of the same engines.
CONCURRENT_TURNS = 2
# A call takes a judge's time for this many turns at most.
MOST_COMPARED_TURNS = 100


@dataclass(frozen=True, slots=True)
class HistoryTurn:
    """A turn that has a verdict of a judge.

    Args:
        verdict: the one that stands.
        version: the version that answered.
    """

    turn_id: TurnId
    version: int
    verdict: int


@dataclass(frozen=True, slots=True)
class NewVerdict:
    """
    Args:
        verdict: None without a valid vote.
        why: for people, without any text of a conversation.
    """

    verdict: int | None
    why: str


@dataclass(frozen=True, slots=True)
class HistoryKey:
    """Identity of a comparison; the same key continues the same comparison.

    Args:
        signal_hash: of the recipe that judges.
        judge: the judge's name, for people.
    """

    policy: str
    signal_hash: str
    judge: str


class HistoryStore(Protocol):
    """Every call raises StoreUnavailable when PostgreSQL does not answer in time."""

    async def next_turns(self, key: HistoryKey, limit: int) -> list[HistoryTurn]:
        """Turns with a verdict of a judge that the comparison lacks, oldest first.

        None with a user's rating, and none of an episode, whose rollout group alone decides.
        """

    async def left(self, key: HistoryKey) -> int:
        """Number of turns that the comparison has not judged yet."""

    async def record(self, key: HistoryKey, turn: HistoryTurn, new: NewVerdict) -> None:
        """Store one comparison. Idempotent: the first one counts."""

    async def pairs(self, key: HistoryKey) -> list[Pair]:
        """All comparisons so far."""

    async def differing(self, key: HistoryKey) -> list[TurnId]:
        """Turns whose new verdict differs from the old, and that were not rated or judged again since; oldest first."""

    async def mark_applied(self, key: HistoryKey, turns: Sequence[TurnId]) -> None:
        """Note that these turns are judged again."""


class HistoryJudge(Protocol):
    @property
    def name(self) -> str:
        """The judge's name, for people."""

    async def verdict(self, turn_id: TurnId, recipe: Recipe) -> NewVerdict:
        """This judge's verdict on a turn, by what followed it. Nothing is stored.

        Raises:
            JudgeUnavailable: retry later.
        """


class ComparedHistory(View):
    """A comparison as the API answers it and `--json` prints it.

    Args:
        judged: turns of this call.
        left: turns not compared yet: call again.
        stopped: why this call ended early; None if it did not.
        all: over all turns compared so far.
        versions: likewise, by the version that answered.
        applied: what became of the turns on which the verdicts differ; the judge workers ask their own judge.
    """

    judge: str
    judged: int
    left: int
    stopped: str | None
    all: Agreement
    versions: dict[int, Agreement]
    applied: Sequence[Rejudged]


def judged_by_workers(judge: str) -> str:
    """Warning before turns are judged again: no stored judgement names the judge that the workers ask.

    Args:
        judge: the one whose verdicts were compared.
    """
    return (
        "The judge workers judge them again, with their own judge: "
        f"if theirs is not the one compared here ({judge}), switch the workers first."
    )


class HistoryOperations:
    def __init__(
        self, store: HistoryStore, judge: HistoryJudge, training: TrainingStore, sessions: SessionOperations
    ) -> None:
        self._store = store
        self._judge = judge
        self._training = training
        self._sessions = sessions

    async def compare(self, policy: str, recipe: Recipe | None, turns: int) -> ComparedHistory:
        """Judge further stored turns, at most `turns`, and compare all so far.

        Args:
            recipe: None: the policy's own, for another judge.

        Raises:
            NotFound: there is no such policy, or it has no recipe.
            RecipeRejected: the recipe asks for no verdicts.
            StoreUnavailable
        """
        recipe, key = await self._key(policy, recipe)
        waiting = await self._store.next_turns(key, min(turns, MOST_COMPARED_TURNS))
        slots = asyncio.Semaphore(CONCURRENT_TURNS)
        stopped: str | None = None

        async def compare_one(turn: HistoryTurn) -> int:
            nonlocal stopped
            async with slots:
                if stopped is not None:
                    return 0
                try:
                    new = await self._judge.verdict(turn.turn_id, recipe)
                except JudgeUnavailable as error:
                    stopped = str(error)
                    return 0
                await self._store.record(key, turn, new)
                return 1

        judged = sum(await asyncio.gather(*(compare_one(turn) for turn in waiting)))
        pairs = await self._store.pairs(key)
        left = await self._store.left(key)
        return ComparedHistory(
            judge=self._judge.name,
            judged=judged,
            left=left,
            stopped=stopped,
            all=agreement(pairs),
            versions=by_version(pairs),
            applied=(),
        )

    async def apply(self, policy: str, recipe: Recipe | None) -> list[Rejudged]:
        """Have the turns judged again, by the judge workers, on which the verdicts differ.

        The workers ask their own judge, which need not be the one compared: see `judged_by_workers`.

        Raises:
            NotFound: there is no such policy, or it has no recipe.
            RecipeRejected: the recipe asks for no verdicts.
            StateConflict: the policy learns by another signal, under which the new verdicts would be of no use.
            SignalFailed, StoreUnavailable
        """
        own = await self._training.recipe(policy)
        recipe, key = await self._key(policy, recipe)
        if own.signal.hash != recipe.signal.hash:
            raise StateConflict(
                f"policy {policy!r} learns by the [signal] of {own.name!r}, and verdicts by that of {recipe.name!r} "
                "would be of no use: set that recipe first, with `clawloop recipe set`",
                code="recipe_conflict",
                field="recipe",
            )
        results = []
        for turn_id in await self._store.differing(key):
            result = await self._sessions.rejudge_turn(turn_id)
            if result is not None:
                results.append(result)
                await self._store.mark_applied(key, [turn_id])
        return results

    async def _key(self, policy: str, recipe: Recipe | None) -> tuple[Recipe, HistoryKey]:
        own = await self._training.recipe(policy)
        recipe = recipe or own
        if not recipe.signal.verdicts:
            raise RecipeRejected("is false: there are no verdicts to compare", field="signal.verdicts")
        return recipe, HistoryKey(policy, recipe.signal.hash, self._judge.name)


# Outcomes -------------------------------------------------------------------------------------------------------------
# Precision of a judge's votes, compared with the outcomes of episodes.


VotedTurns = Callable[[str], Awaitable[list[VotedTurn]]]
"""The newest turns of a policy's episodes that have a reward and were voted on.

Raises:
    NotFound: there is no such policy.
    StoreUnavailable
"""


class JudgePrecision(View):
    """
    Args:
        by_votes: for the majority of the first 1, 3, 5 … votes; empty without a voted turn.
    """

    policy: str
    by_votes: Sequence[Precision]


async def judge_precision(voted_turns: VotedTurns, policy: str) -> JudgePrecision:
    """
    Raises:
        NotFound, StoreUnavailable
    """
    return JudgePrecision(policy=policy, by_votes=precision_by_votes(await voted_turns(policy)))
