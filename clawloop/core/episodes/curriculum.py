"""Choice of a policy's tasks: the weight of each kind, and its difficulty (RLAnything, arXiv 2602.02488).

Equal rewards teach nothing, so tasks should neither all fail nor all succeed. Only counts decide: the same counts give
the same tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from clawloop.core.episodes.kinds import Levels

SUCCESS = 0.5
"""An episode has succeeded with at least this reward."""
LOW, HIGH = 0.2, 0.8
ENOUGH = 32
"""Episodes with a reward of which a share of success is computed. At a true share of 0.5, more than 0.8 of them succeed
one time in 4,000, if they are independent; episodes of one group are not quite."""
_LONGEST_PATIENCE = 8 * ENOUGH
# A kind that teaches nothing now is still drawn, so that it is seen when it does.
_LEAST_WEIGHT = 0.125
# Multiples of it, less their whole part, fall evenly into 0 to 1.
_GOLDEN = 0.6180339887498949


def groups_to_move(kinds: int, size: int) -> int:
    """Number of groups of equal rewards after which every kind that can move has moved, and its trial is decided.

    Args:
        size: of a group.
    """
    return 2 * kinds * -(-ENOUGH // size)


@dataclass(frozen=True, slots=True)
class Counted:
    """One finished group: its episodes with a reward, and those that succeeded."""

    scored: int
    succeeded: int


@dataclass(frozen=True, slots=True)
class Trial:
    """A change that is not decided yet.

    Args:
        level: before it.
        success: before it.
    """

    level: int
    success: float


@dataclass(frozen=True, slots=True)
class KindState:
    """
    Args:
        weight: how often it is drawn, compared with others; 1 unless it teaches nothing.
        patience: episodes that have to be counted before it is changed.
    """

    kind: str
    level: int
    weight: float = 1.0
    patience: int = ENOUGH
    trial: Trial | None = None

    @property
    def needed(self) -> int:
        """Episodes that have to be counted since the last change, before the next."""
        return self.patience if self.trial is None else ENOUGH


def first_state(kind: str, levels: Levels) -> KindState:
    """A kind that nothing was counted of."""
    return KindState(kind, levels.first)


def success_of(groups: Sequence[Counted]) -> float | None:
    """The share of success of the newest groups that have `ENOUGH` episodes together, or of all; None without any.

    Args:
        groups: newest first.
    """
    scored = succeeded = 0
    for group in groups:
        if scored >= ENOUGH:
            break
        scored += group.scored
        succeeded += group.succeeded
    return succeeded / scored if scored else None


def revise(state: KindState, levels: Levels, groups: Sequence[Counted]) -> tuple[KindState, str]:
    """The state of a kind after what was counted, and why it changed; the same state and no reason if it did not.

    A level that is left for another is on trial: it stays if success moved as meant, and is undone otherwise. A weight
    is no trial, as it changes no task: it is made less where levels do not help, and 1 again with success.

    Args:
        groups: of this kind and level since the state last changed, newest first.
    """
    success = success_of(groups)
    if success is None or sum(group.scored for group in groups) < state.needed:
        return state, ""
    if state.trial is not None:
        return _decide(state, state.trial, success)
    if LOW <= success <= HIGH:
        if state.weight == 1.0 and state.patience == ENOUGH:
            return state, ""
        return KindState(state.kind, state.level), f"success {success:.2f}: drawn as often as others again"
    level = state.level + (1 if success > HIGH else -1)
    if levels.holds(level):
        changed = replace(state, level=level, trial=Trial(state.level, success))
        return changed, f"success {success:.2f}: level {level} instead of {state.level}, on trial"
    weight = _less(state.weight)
    if weight == state.weight:
        return state, ""
    end = "hardest" if success > HIGH else "easiest"
    return replace(state, weight=weight), f"success {success:.2f} at the {end} level: drawn less often"


def draw(states: Sequence[KindState], number: int) -> KindState:
    """The kind of a policy's `number`-th task: each as often as its weight says, evenly spread.

    Args:
        states: at least one, in an order that does not change.
    """
    point = (number * _GOLDEN) % 1.0 * sum(state.weight for state in states)
    for state in states:
        if point < state.weight:
            return state
        point -= state.weight
    return states[-1]  # rounding


def _decide(state: KindState, trial: Trial, success: float) -> tuple[KindState, str]:
    harder = state.level > trial.level
    moved = success < trial.success if harder else success > trial.success
    found = f"success {success:.2f} at level {state.level}, {trial.success:.2f} at {trial.level}"
    # Too hard is worse than too easy: nothing is learned where nothing succeeds.
    if moved and not (harder and success < LOW):
        return KindState(state.kind, state.level), f"{found}: kept"
    why = "too hard" if moved else "not as meant"
    undone = replace(
        state,
        level=trial.level,
        weight=_less(state.weight),
        patience=min(2 * state.patience, _LONGEST_PATIENCE),
        trial=None,
    )
    return undone, f"{found}: undone, {why}"


def _less(weight: float) -> float:
    return max(weight / 2, _LEAST_WEIGHT)
