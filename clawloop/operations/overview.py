"""Status of every component, and whether the ledger is whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from clawloop.core.contracts.answers import EngineList, ServiceStatus, TrainingStatus
from clawloop.core.contracts.episodes import RolloutsState
from clawloop.core.contracts.training import TrainingState
from clawloop.operations.engines import EngineOperations
from clawloop.operations.rollouts import RolloutOperations
from clawloop.operations.training import TrainingStore
from clawloop.operations.workflow_links import NO_LINKS, WorkflowLinks

# Status ---------------------------------------------------------------------------------------------------------------
# Status of every component: engines, policies, sessions, and current problems.

NO_TEMPORAL = "no Temporal is configured: turns are recorded and not judged; set TEMPORAL_ADDRESS"
"""Problem shown if no Temporal is configured; a Temporal that does not answer is another problem."""


@dataclass(frozen=True, slots=True)
class ServiceCounts:
    """
    Args:
        policies: ids of all.
        late: main turns stored more than two minutes ago whose workflow was not notified.
    """

    policies: tuple[str, ...]
    sessions: int
    open_sessions: int
    newest_turn_at: datetime | None
    waiting: int
    late: int


TemporalProblem = Callable[[], Awaitable[str | None]]
"""The problem with Temporal, for people; None if it answers."""


class Overview:
    """
    Args:
        counts: raises StoreUnavailable.
    """

    def __init__(
        self,
        counts: Callable[[], Awaitable[ServiceCounts]],
        engines: EngineOperations,
        training: TrainingStore,
        temporal: TemporalProblem,
        rollouts: RolloutOperations,
        links: WorkflowLinks = NO_LINKS,
    ) -> None:
        self._temporal = temporal
        self._counts = counts
        self._links = links
        self._engines = engines
        self._training = training
        self._rollouts = rollouts

    async def status(self) -> ServiceStatus:
        """Status of every component.

        Raises:
            StoreUnavailable
        """
        counts = await self._counts()
        engines = await self._engines.list()
        policies = [TrainingStatus.of(await self._training.status(policy)) for policy in counts.policies]
        problems = _of_engines(engines)
        problems += [
            f"training of {policy.policy} is {policy.reason}"
            for policy in policies
            if policy.state is TrainingState.PAUSED
        ]
        if (away := await self._temporal()) is not None:
            problems.append(away)
        else:
            problems += await self._environments_without_worker(counts.policies)
        if counts.late:
            turns = "1 turn was" if counts.late == 1 else f"{counts.late} turns were"
            problems.append(f"{turns} not notified for over two minutes: is Temporal, or the orchestrator, away?")
        workflows = [f"training/{policy.policy}" for policy in policies]
        workflows += [f"engine/{engine.id}" for engine in engines.engines]
        return ServiceStatus(
            engines=len(engines.engines),
            engines_answering=sum(engine.healthy and not engine.draining for engine in engines.engines),
            policies=policies,
            sessions=counts.sessions,
            open_sessions=counts.open_sessions,
            newest_turn_at=counts.newest_turn_at,
            waiting=counts.waiting,
            problems=problems,
            temporal_ui=self._links.ui,
            workflows={name: link for name in workflows if (link := self._links.of(name)) is not None},
        )

    async def _environments_without_worker(self, policies: Sequence[str]) -> list[str]:
        """A problem for each environment that running rollouts wait for because it has no worker."""
        views = [await self._rollouts.status(policy) for policy in policies]
        waiting = [view for view in views if view.state is RolloutsState.RUNNING and view.no_worker]
        return list(dict.fromkeys(view.no_worker for view in waiting))


def _of_engines(engines: EngineList) -> list[str]:
    if not engines.engines:
        return ["there is no engine: `clawloop engine add URL`"]
    problems = [
        f"engine {engine.id}: {engine.problem}" if engine.healthy else f"engine {engine.id} {_silent(engine.problem)}"
        for engine in engines.engines
        if engine.problem is not None or not engine.healthy
    ]
    if all(engine.draining for engine in engines.engines):
        problems.append(f"every engine is drained: `clawloop engine drain --undo {engines.engines[0].id}`")
    return problems


def _silent(problem: str | None) -> str:
    said = problem or "does not answer"
    return f"{said}: it starts, which takes minutes for a large model, or is down; its log says which"
