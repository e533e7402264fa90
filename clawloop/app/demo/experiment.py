"""Executes one run of the demo: a synthetic user chats while the versions trained from the chat are evaluated.

Chat requests never wait for training. A *paced* user waits between two rounds of sessions, because people take longer
for a session than this machine takes for a step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import fmean
from typing import Protocol, TypeAlias
from uuid import UUID

from clawloop.app.demo.admin_client import AdminClient
from clawloop.app.demo.openai_client import ChatClient, ModelGone
from clawloop.app.demo.plan import Plan, PlannedRun
from clawloop.app.demo.report import Evaluation, RunTotals
from clawloop.app.demo.sessions import TasteFindings, TasteUser, ToyUser, UserSide
from clawloop.app.local.supervision.supervisor import Board
from clawloop.core.contracts.answers import TrainingStatus
from clawloop.core.contracts.training import TrainingState
from clawloop.core.contracts.views import SessionView
from clawloop.core.errors import SetupError
from clawloop.core.ids import version_name

_POLL_SECONDS = 0.3
# Until then each version is evaluated, whatever `Plan.measure_every` is: this is where the curve bends.
FULLY_MEASURED_INTERACTIONS = 128
_OPEN_OUTCOMES = ("waiting", "sampled")


Keep: TypeAlias = Callable[[Evaluation], Awaitable[None]]
"""Keeps an evaluation where the page finds it."""


class TrainingPaused(SetupError):
    """Training paused itself, so no more versions follow."""


class DemoBoard(Board, Protocol):
    """Shows the progress of runs, and of the parts that serve them."""

    def add_evaluation(self, run: PlannedRun, row: Evaluation) -> None: ...

    def status(self, run: PlannedRun, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class PolicyAccess:
    """Addresses and keys with which a run reaches its policy.

    Args:
        url: the gateway's, without `/v1`.
        key: the policy's API key; admin_key: a key with the scope `admin`.
        base_model: the served name of version 0.
    """

    url: str
    key: str
    admin_key: str
    base_model: str


def rounds(interactions: int, side: UserSide, first: int = 1) -> list[list[int]]:
    """Split `interactions` requests into rounds of concurrent sessions; return the size of each session.

    Args:
        first: number of the first session.
    """
    left, planned, numbers = interactions, list[list[int]](), count(first)
    while left:
        sizes: list[int] = []
        while left and len(sizes) < side.concurrent:
            sizes.append(min(left, side.session_requests(next(numbers))))
            left -= sizes[-1]
        planned.append(sizes)
    return planned


@dataclass
class Experiment:
    """One run in progress.

    Args:
        wait_timeout_seconds: after this limit the run goes on without the pending turns; None: the user's own.

    Attributes:
        evaluations: so far, in order.
    """

    run: PlannedRun
    access: PolicyAccess
    client: ChatClient
    admin: AdminClient
    board: DemoBoard
    plan: Plan
    side: UserSide
    wait_timeout_seconds: float | None = None
    keep: Keep | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    _steps: set[int] = field(default_factory=set)
    _started: float = 0.0
    _interactions: int = 0
    _chat_paused: bool = False  # the user waits until every turn is learned
    _requests_by_session: dict[str, int] = field(default_factory=dict)
    _sessions: dict[str, SessionView] = field(default_factory=dict)  # as last read
    _finalized_sessions: set[str] = field(default_factory=set)  # all of their turns have a final outcome
    _judged_turns: set[UUID] = field(default_factory=set)
    _active_version: int = 0
    _flipped_at: int | None = None
    _gave_up: str | None = None

    async def execute(self) -> None:
        """Chat and evaluate the versions as they become active.

        Raises:
            TrainingPaused
            SetupError: the gateway does not answer.
        """
        self._started = time.monotonic()
        await self._evaluate(0)
        measuring = None if self.plan.paced else asyncio.create_task(self._measure_versions())
        before_flip = self.plan.interactions // 2 if self.plan.flip else self.plan.interactions
        try:
            await self._chat_rounds(before_flip, measuring)
            if self.plan.flip:
                await self._flip()
                await self._chat_rounds(self.plan.interactions - before_flip, measuring)
            self._chat_paused = True
            if measuring is not None:
                await measuring
        finally:
            if measuring is not None:
                measuring.cancel()
        await self._evaluate_active()

    async def conclude(self) -> TasteFindings | None:
        """Measure the last version thoroughly, and what a taste is compared with; None with the toy."""
        if not isinstance(self.side, TasteUser):
            return None
        await self._evaluate(self._active_version, thorough=True)
        self.board.status(self.run, "asking the frozen model with the user's words as notes")
        return await self.side.findings(self.client, self.access.base_model)

    async def totals(self, stopped: str | None = None, taste: TasteFindings | None = None) -> RunTotals:
        """Return the totals of the run.

        Args:
            stopped: why the run ended early; None if it did not.
            taste: what `conclude` returned.
        """
        await self._mean_reward()  # counts the steps of the last turns
        trained = await self.admin.trained_versions(self.run.policy)
        return RunTotals(
            interactions=self._interactions,
            failed=self.client.failed,
            versions=trained.count,
            rejected=trained.rejected,
            probed=trained.probed,
            steps=len(self._steps),
            seconds=time.monotonic() - self._started,
            flipped_at=self._flipped_at,
            stopped=stopped,
            gave_up=self._gave_up,
            recorded=await self._recorded(),
            taste=taste,
        )

    async def _chat_rounds(self, interactions: int, measuring: asyncio.Task[None] | None) -> None:
        for sizes in rounds(interactions, self.side, len(self._requests_by_session) + 1):
            progress = f"{self._interactions} of {self.plan.interactions} interactions"
            self.board.status(self.run, f"{progress}, chatting")
            if measuring is not None and measuring.done():
                await measuring  # raises the error that ended it
            await self._chat(sizes)
            if measuring is None:
                self._chat_paused = True
                await self._measure_versions()
                self._chat_paused = False

    async def _flip(self) -> None:
        """Flip the preference of the user and of the grading."""
        if self.plan.paced:
            await self._evaluate_active()
        assert isinstance(self.side, ToyUser), "the plan has no flip of a taste"
        self.side.flip(self.plan.flip)
        self._flipped_at = self._interactions
        if self.plan.paced:
            await self._evaluate(self._active_version)

    async def _evaluate_active(self) -> None:
        """Evaluate the active version if it was skipped."""
        if self._active_version > self.evaluations[-1].version:
            await self._evaluate(self._active_version)

    async def _chat(self, sizes: list[int]) -> None:
        async def one(number: int, size: int) -> None:
            name = f"{self.run.policy}-{number}"
            self._requests_by_session[name] = 0
            await self.side.chat(self.client, number, name, size, partial(self._count_request, name))

        first = len(self._requests_by_session) + 1
        try:
            async with asyncio.TaskGroup() as group:
                for offset, size in enumerate(sizes):
                    group.create_task(one(first + offset, size))
        except* SetupError as group_error:
            raise group_error.exceptions[0] from None

    def _count_request(self, session: str) -> None:
        self._interactions += 1
        self._requests_by_session[session] += 1

    async def _is_caught_up(self) -> bool:
        """True if every turn is stored (the spool may deliver turns late) and learned."""
        if await self._recorded() < self._interactions:
            return False
        return (await self.admin.training_status(self.run.policy)).is_done

    async def _recorded(self) -> int:
        """Count the interactions whose turns are stored.

        A request that was sent again may be stored twice, which does not make up for a turn of another session.
        """
        await self._refresh_sessions()
        for name, seen in self._sessions.items():
            if seen.main_turns < self._requests_by_session[name]:
                stored = len(await self.admin.main_turns(seen.id))
                self._sessions[name] = seen.model_copy(update={"main_turns": stored})
        return sum(min(seen.main_turns, self._requests_by_session[name]) for name, seen in self._sessions.items())

    async def _refresh_sessions(self) -> None:
        """Update the run's sessions from the newest ones; an evaluation adds 60 sessions, so older chats drop out."""
        newest = await self.admin.sessions(self.run.policy)
        self._sessions |= {name: newest[name] for name in newest.keys() & self._requests_by_session.keys()}

    async def _measure_versions(self) -> None:
        """Evaluate versions as they become active, until the chat is paused and every turn is learned."""
        patience = self.side.wait_seconds if self.wait_timeout_seconds is None else self.wait_timeout_seconds
        waited_since = time.monotonic()
        while True:
            status = await self.admin.training_status(self.run.policy)
            if status.version > self._active_version or self._is_flip_unmeasured():
                self._active_version = status.version
                if self._is_evaluation_due():
                    await self._evaluate(status.version)
                waited_since = time.monotonic()
                continue
            if self._chat_paused and status.is_done and await self._is_caught_up():
                return
            if status.state is TrainingState.PAUSED:
                raise TrainingPaused(f"training of {self.run.policy} has paused itself: {status.reason}")
            if not self._chat_paused:
                waited_since = time.monotonic()
            if time.monotonic() - waited_since > patience:
                gave_up = f"gave up waiting after {patience:g} s: {status.reason}"
                self.board.say(f"{self.run.policy}: {gave_up}")
                self._gave_up = self._gave_up or gave_up
                return
            self.board.status(self.run, f"{self._interactions} interactions; {_wait_reason(status)}")
            await asyncio.sleep(_POLL_SECONDS)

    def _is_flip_unmeasured(self) -> bool:
        return self._flipped_at is not None and not self.evaluations[-1].flipped

    def _is_evaluation_due(self) -> bool:
        is_dense = self._interactions - (self._flipped_at or 0) <= FULLY_MEASURED_INTERACTIONS
        skipped = self._active_version - self.evaluations[-1].version
        return is_dense or self._is_flip_unmeasured() or skipped >= self.plan.measure_every

    async def _evaluate(self, version: int, *, thorough: bool = False) -> None:
        interactions, is_flipped = self._interactions, self._flipped_at is not None
        self.board.status(self.run, f"{interactions} interactions; evaluating version {version} on fixed requests")
        model = version_name(self.run.policy, version, self.access.base_model)
        try:
            measured = await self.side.measure(self.client, model, thorough=thorough)
        except ModelGone:
            # An engine that was killed loads the newest versions again, not those before.
            if (await self.admin.training_status(self.run.policy)).version == version:
                raise
            self.board.say(f"{self.run.policy}: version {version} was gone before it was measured")
            return
        row = Evaluation(
            step=version,
            version=version,
            interactions=interactions,
            reward=await self._mean_reward(),
            match=measured.match,
            exact=measured.exact,
            requests=measured.requests,
            words=measured.words,
            cut=measured.cut,
            loops=measured.loops,
            failed=self.client.failed,
            seconds=time.monotonic() - self._started,
            flipped=is_flipped,
        )
        self.evaluations.append(row)
        self.board.add_evaluation(self.run, row)
        if self.keep is not None:
            await self.keep(row)

    async def _mean_reward(self) -> float | None:
        """Return the mean verdict of the turns judged since the last call; None if there are none."""
        if len(self._sessions) < len(self._requests_by_session):
            await self._refresh_sessions()
        unfinalized = {
            name: session.id for name, session in self._sessions.items() if name not in self._finalized_sessions
        }
        turns_by_session = await asyncio.gather(*(self.admin.main_turns(session) for session in unfinalized.values()))
        for name, session_turns in zip(unfinalized, turns_by_session, strict=True):
            if session_turns and all(turn.outcome not in _OPEN_OUTCOMES for turn in session_turns):
                self._finalized_sessions.add(name)
        turns = [turn for session_turns in turns_by_session for turn in session_turns]
        self._steps |= {turn.step for turn in turns if turn.step is not None and turn.outcome == "trained"}
        newly_judged = [turn for turn in turns if turn.verdict is not None and turn.id not in self._judged_turns]
        self._judged_turns |= {turn.id for turn in newly_judged}
        return fmean(float(turn.verdict or 0) for turn in newly_judged) if newly_judged else None


def _wait_reason(status: TrainingStatus) -> str:
    if status.head != status.version:
        return f"publishing version {status.head}"
    return f"step {status.step}: {status.reason}" if status.state is TrainingState.WAITING else status.reason


async def run_experiment(
    run: PlannedRun, access: PolicyAccess, board: DemoBoard, plan: Plan, keep: Keep | None = None
) -> tuple[list[Evaluation], RunTotals]:
    """Execute a run and return its evaluations and totals; it ends early if training pauses itself.

    Raises:
        SetupError: the gateway does not answer.
    """

    reported: set[str] = set()

    def report_failure(text: str) -> None:
        if text not in reported:
            reported.add(text)
            board.say(f"{run.policy}: a request failed, and is sent again: {text} (the same once more is only counted)")

    async with (
        ChatClient(access.url, access.key, report_failure) as client,
        AdminClient(access.url, access.admin_key) as admin,
    ):
        side = ToyUser(run.seed) if plan.model is None else TasteUser(run.seed, board.say)
        experiment = Experiment(run, access, client, admin, board, plan, side, keep=keep)
        stopped = None
        try:
            await experiment.execute()
        except TrainingPaused as why:
            stopped = str(why)
        taste = await experiment.conclude()
        return experiment.evaluations, await experiment.totals(stopped, taste)
