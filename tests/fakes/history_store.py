"""Comparisons of verdicts in memory, and a judge that says what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clawloop.core.ids import TurnId
from clawloop.core.judging.agreement import Pair
from clawloop.core.recipes.recipe import Recipe
from clawloop.operations.history import HistoryKey, HistoryTurn, NewVerdict


class FakeHistoryStore:
    """Satisfies `clawloop.operations.history.HistoryStore`.

    Attributes:
        turns: those that have a verdict, and no rating.
        of_episodes: those of `turns` and of the comparisons that belong to episodes.
    """

    def __init__(self, turns: Sequence[HistoryTurn] = ()) -> None:
        self.turns = list(turns)
        self.of_episodes: set[TurnId] = set()
        self._compared: dict[HistoryKey, dict[TurnId, tuple[Pair, bool]]] = {}

    async def next_turns(self, key: HistoryKey, limit: int) -> list[HistoryTurn]:
        return self._missing(key)[:limit]

    async def left(self, key: HistoryKey) -> int:
        return len(self._missing(key))

    async def record(self, key: HistoryKey, turn: HistoryTurn, new: NewVerdict) -> None:
        pair = Pair(turn.version, turn.verdict, new.verdict)
        self._compared.setdefault(key, {}).setdefault(turn.turn_id, (pair, False))

    async def pairs(self, key: HistoryKey) -> list[Pair]:
        compared = self._compared.get(key, {}).items()
        return [pair for turn, (pair, _) in compared if turn not in self.of_episodes]

    async def differing(self, key: HistoryKey) -> list[TurnId]:
        standing = {turn.turn_id: turn.verdict for turn in self._of_chats()}
        return sorted(
            turn
            for turn, (pair, done) in self._compared.get(key, {}).items()
            if not done and pair.after not in (None, pair.before) and standing.get(turn) == pair.before
        )

    async def mark_applied(self, key: HistoryKey, turns: Sequence[TurnId]) -> None:
        for turn in turns:
            pair, _ = self._compared[key][turn]
            self._compared[key][turn] = pair, True

    def judge_again(self, turn_id: TurnId, verdict: int) -> None:
        """The turn has a further judgement, whose verdict stands."""
        self.turns = [replace(turn, verdict=verdict) if turn.turn_id == turn_id else turn for turn in self.turns]
        for compared in self._compared.values():
            if turn_id in compared:
                compared[turn_id] = compared[turn_id][0], True

    def rate(self, turn_id: TurnId) -> None:
        self.turns = [turn for turn in self.turns if turn.turn_id != turn_id]

    def _missing(self, key: HistoryKey) -> list[HistoryTurn]:
        return [turn for turn in self._of_chats() if turn.turn_id not in self._compared.get(key, {})]

    def _of_chats(self) -> list[HistoryTurn]:
        return [turn for turn in self.turns if turn.turn_id not in self.of_episodes]


class FakeHistoryJudge:
    """Satisfies `clawloop.operations.history.HistoryJudge`."""

    def __init__(self, verdict: int | None = 1) -> None:
        self.new = verdict

    @property
    def name(self) -> str:
        return "another"

    async def verdict(self, turn_id: TurnId, recipe: Recipe) -> NewVerdict:
        return NewVerdict(self.new, "said so")
