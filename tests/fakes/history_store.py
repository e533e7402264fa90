"""Comparisons of verdicts in memory, and a judge that says what it is told."""

from __future__ import annotations

from collections.abc import Sequence

from clawloop.ids import TurnId
from clawloop.judging.agreement import Pair
from clawloop.operations.history import HistoryKey, HistoryTurn, NewVerdict
from clawloop.recipes.recipe import Recipe


class FakeHistoryStore:
    """Satisfies `clawloop.operations.history.HistoryStore`.

    Attributes:
        turns: those that have a verdict.
    """

    def __init__(self, turns: Sequence[HistoryTurn] = ()) -> None:
        self.turns = list(turns)
        self._compared: dict[HistoryKey, dict[TurnId, tuple[Pair, bool]]] = {}

    async def next_turns(self, key: HistoryKey, limit: int) -> list[HistoryTurn]:
        return self._missing(key)[:limit]

    async def left(self, key: HistoryKey) -> int:
        return len(self._missing(key))

    async def record(self, key: HistoryKey, turn: HistoryTurn, new: NewVerdict) -> None:
        pair = Pair(turn.version, turn.verdict, new.verdict)
        self._compared.setdefault(key, {}).setdefault(turn.turn_id, (pair, False))

    async def pairs(self, key: HistoryKey) -> list[Pair]:
        return [pair for pair, _ in self._compared.get(key, {}).values()]

    async def differing(self, key: HistoryKey) -> list[TurnId]:
        compared = self._compared.get(key, {}).items()
        return sorted(turn for turn, (pair, done) in compared if not done and pair.after not in (None, pair.before))

    async def mark_applied(self, key: HistoryKey, turns: Sequence[TurnId]) -> None:
        for turn in turns:
            pair, _ = self._compared[key][turn]
            self._compared[key][turn] = pair, True

    def _missing(self, key: HistoryKey) -> list[HistoryTurn]:
        return [turn for turn in self.turns if turn.turn_id not in self._compared.get(key, {})]


class FakeHistoryJudge:
    """Satisfies `clawloop.operations.history.HistoryJudge`."""

    def __init__(self, verdict: int | None = 1) -> None:
        self.new = verdict

    @property
    def name(self) -> str:
        return "another"

    async def verdict(self, turn_id: TurnId, recipe: Recipe) -> NewVerdict:
        return NewVerdict(self.new, "said so")
