"""What the sweep does for episodes: late turns, and rollouts whose workflow was not notified or was lost."""

from __future__ import annotations

from typing import Protocol

from clawloop.contracts.notices import Notifier, RolloutsChanged


class LateTurns(Protocol):
    async def end_late_turns(self) -> int:
        """End turns that were stored after their rollout group was settled; the number of turns.

        Raises:
            StoreUnavailable
        """


class RunningRollouts(Protocol):
    async def running(self) -> list[str]:
        """Policies whose rollouts run, or have open groups.

        Raises:
            StoreUnavailable
        """


class JudgedVotes(Protocol):
    async def reward_votes(self) -> int:
        """Make samples of a learning judge's votes whose rollout group is settled; the number of samples.

        Raises:
            StoreUnavailable
        """


class EpisodeUpkeep:
    def __init__(self, turns: LateTurns, rollouts: RunningRollouts, notifier: Notifier, votes: JudgedVotes) -> None:
        self._votes = votes
        self._turns = turns
        self._rollouts = rollouts
        self._notifier = notifier

    async def sweep(self) -> int:
        """End late turns, notify the workflows of running rollouts and reward judges that learn; the number of late
        turns."""
        late = await self._turns.end_late_turns()
        for policy in await self._rollouts.running():
            await self._notifier.notify(RolloutsChanged(policy))
        await self._votes.reward_votes()
        return late
