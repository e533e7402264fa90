"""Runs episodes of one environment of verifiers, which owns agent, tools, boxes and scoring."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from clawloop.contracts.episodes import AgentRun
from clawloop.environments.task import parse_task_id
from clawloop.environments.verifiers.leftovers import RolloutNotes
from clawloop.environments.verifiers.loading import LoadedEnvironment
from clawloop.environments.verifiers.outcome import kept_reward, outcome_of, unanswered
from clawloop.environments.verifiers.relay import KeyRelay
from clawloop.errors import EpisodeUnusable
from clawloop.ids import EpisodeId


class VerifiersRunner:
    """Satisfies `clawloop.episodes.ports.EpisodeRunner`; use `serving`.

    Task `train-N` is the N-th of the training tasks, and after the last the first again; `test-N` likewise.
    """

    def __init__(self, loaded: LoadedEnvironment, relay: KeyRelay, context: Any, notes: RolloutNotes) -> None:
        self._loaded = loaded
        self._relay = relay
        self._context = context
        self._notes = notes

    @classmethod
    @asynccontextmanager
    async def serving(cls, loaded: LoadedEnvironment, relay: KeyRelay) -> AsyncIterator[VerifiersRunner]:
        """A runner, while the environment's shared servers and the relay to the gateway run."""
        import verifiers.v1 as vf

        with RolloutNotes.open() as notes:
            async with relay.serving() as url, loaded.env.serving():
                # The key is the relay's matter.
                client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="CLAWLOOP_EPISODE")
                context = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
                yield cls(loaded, relay, context, notes)

    async def require_usable(self, environment: str, task_id: str) -> None:
        """What verifiers loads it answers for."""

    async def run_agent(self, environment: str, task_id: str, episode: EpisodeId, key: str) -> AgentRun:
        [slot] = self._loaded.env.slots(self._task(task_id))
        traces: list[str] = []

        def begun(trace: Any) -> None:
            traces.append(trace.id)
            self._notes.begun(trace.id)
            self._relay.admit(trace.id, key)

        try:
            async with asyncio.timeout(self._loaded.seconds):
                done = await self._loaded.env.run_slot(slot, self._context, on_trace=begun)
        except TimeoutError:
            return unanswered(self._loaded.seconds)
        finally:
            for trace in traces:
                self._relay.dismiss(trace)
                self._notes.ended(trace)
        return outcome_of(done, self._loaded.role)

    async def verify(
        self, environment: str, task_id: str, episode: EpisodeId, artifact: bytes
    ) -> tuple[float | None, str]:
        """The reward that verifiers gave at the episode's end."""
        return kept_reward(artifact)

    def _task(self, task_id: str) -> Any:
        split, number = parse_task_id(task_id)
        tasks = self._loaded.tasks[split]
        if not tasks:
            raise EpisodeUnusable(f"the environment has no {split} task")
        return tasks[number % len(tasks)]
