"""Learning of one policy on a real Temporal development server; ledger, trainer and engines are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

from temporalio import activity
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from activities.practice import Practise, Practised
from activities.serving.publishing import Published, PublishVersion
from activities.training.gate import DecideVersion, VersionDecided
from activities.training.probe_version import AskBase, BaseAsked, ProbeVersion, VersionProbed
from activities.training.steps import AbandonStep, ClaimBatch, QuarantineStep
from activities.training.train_step import StepDone, TrainStep
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.core.contracts.notices import BatchWaits, OperatorChanged
from clawloop.core.contracts.training import (
    Claim,
    OperatorAction,
    OperatorChange,
    StepState,
    TrainingState,
    TrainingView,
)
from tests.workflows.conftest import IDLE, end_all
from workflows import names
from workflows.state import PolicyTraining
from workflows.training import TrainingWorkflow

TrainingHandle = WorkflowHandle[TrainingWorkflow, None]
Activities = Sequence[Callable[..., Awaitable[object]]]


class ScriptedLearning:
    """Stands in for the ledger, the trainer and the engines of one policy.

    Attributes:
        ready: fresh samples.
        happened: calls of the ledger, trainer and engines, in order; reads are only counted.
        gate: a step waits for it.
        engines: publishing waits for it.
        fails: how a step fails, by its number.
        ends: the state and reason of a step, by its number; a candidate otherwise.
        rejects: why the gate rejects a version, by its number; it accepts the others.
        probed: versions are asked probes.
        pool: of the trainers; by default one of its own.
        probes_fail: how asking a version fails, by its number.
        general_unasked: the base model was not asked the general questions.
        base: the base model's answers wait for it.
        base_fails: how asking the base model fails.
        at_gate: the gate waits for it.
        practises: the recipe has lessons practised.
        requests: those that are left to practise.
        practise_fails: how practising fails, one error for each call.
        idle: the engines have nothing else to do.
    """

    def __init__(self) -> None:
        self.policy = f"p{uuid4().hex[:8]}"
        self.pool = self.policy
        self.needed = 16
        self.ready = 0
        self.judging = 0
        self.oldest_seconds: float | None = None
        self.max_wait_seconds = 86_400.0
        self.closed_seconds: float | None = None
        self.paused: str | None = None
        self.pinned: int | None = None
        self.head = self.version = self.epoch = 0
        self.step = 1
        self.step_state: StepState | None = None
        self.looks = 0
        self.happened: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.engines = asyncio.Event()
        self.engines.set()
        self.fails: Callable[[int], ApplicationError | None] = lambda n: None
        self.ends: dict[int, tuple[StepState, str]] = {}
        self.rejects: dict[int, str] = {}
        self.claims_fail: list[ApplicationError] = []
        self.probed = False
        self.probes_fail: dict[int, ApplicationError] = {}
        self.general_unasked = False
        self.base = asyncio.Event()
        self.base.set()
        self.base_fails: ApplicationError | None = None
        self.at_gate = asyncio.Event()
        self.at_gate.set()
        self.at_once = self.most_at_once = 0
        self.practises = False
        self.requests = 0
        self.practise_fails: list[ApplicationError] = []
        self.idle = True

    @property
    def where_workflows_run(self) -> Activities:
        return [self.look, self.claim, self.decide]

    @property
    def on_the_queue(self) -> Activities:
        return [self.quarantine, self.abandon, self.publish]

    @activity.defn(name="read_training_status")
    async def look(self, policy: str) -> TrainingView:
        self.looks += 1
        state = TrainingState.WAITING
        reason = f"{self.ready} of {self.needed} samples, {self.judging} turns are being judged"
        if self.closed_seconds is not None:
            reason = f"outside of its hours; {reason}"
        if self.step_state is not None:
            state, reason = TrainingState.TRAINING, ""
        if self.paused is not None:
            state, reason = TrainingState.PAUSED, f"paused: {self.paused}"
        return TrainingView(
            policy=policy,
            pool=self.pool,
            state=state,
            reason=reason,
            ready=self.ready,
            needed=self.needed,
            judging=self.judging,
            oldest_seconds=self.oldest_seconds,
            step=self.step,
            step_state=self.step_state,
            head=self.head,
            version=self.version,
            epoch=self.epoch,
            pinned=self.pinned,
            unpublished=self.pinned is None and self.head != self.version,
            max_wait_seconds=self.max_wait_seconds,
            closed_seconds=self.closed_seconds,
            probed=self.probed,
            general_unasked=self.general_unasked,
            canary=None,
            canary_parent=None,
            progress=None,
            practises=self.practises,
        )

    @activity.defn(name="claim_batch")
    async def claim(self, ask: ClaimBatch) -> Claim:
        if self.claims_fail:
            raise self.claims_fail.pop()
        if self.step_state is not None:
            return Claim(policy=ask.policy, n=ask.n, state=self.step_state, samples=self.needed)
        old = self.oldest_seconds is not None and self.oldest_seconds >= self.max_wait_seconds
        if (
            self.paused is not None
            or self.closed_seconds is not None
            or (self.ready < self.needed and not (old and self.ready))
        ):
            return Claim(policy=ask.policy, n=ask.n, state=None, reason="waiting")
        samples = min(self.ready, self.needed)
        self.ready -= samples
        self.oldest_seconds = None
        self.step_state = StepState.CLAIMED
        self.happened.append(f"claim {ask.n}: {samples}")
        return Claim(policy=ask.policy, n=ask.n, state=StepState.CLAIMED, samples=samples)

    @activity.defn(name="train_step")
    async def train(self, ask: TrainStep) -> StepDone:
        self.happened.append(f"train {ask.n}")
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        epoch = self.epoch
        try:
            while not self.gate.is_set():
                activity.heartbeat()
                await asyncio.sleep(0.05)
            if (error := self.fails(ask.n)) is not None:
                raise error
        finally:
            self.at_once -= 1
        state, reason = self.ends.get(ask.n, (StepState.CANDIDATE, ""))
        if epoch != self.epoch:
            state, reason = StepState.ABANDONED, f"rolled back to v{self.head}"
        parent = self.head
        if state is StepState.CANDIDATE:
            self.step_state = state
        elif state is not StepState.QUARANTINED:
            self._end(state)
        return StepDone(
            policy=ask.policy,
            n=ask.n,
            state=state,
            parent=parent,
            samples=self.needed,
            loss=0.5,
            kl=0.01,
            ratio=1.0,
            seconds=1.25,
            reason=reason,
        )

    def _end(self, state: StepState) -> None:
        if state is StepState.COMMITTED:
            self.head = self.step
        else:
            self.ready += self.needed
        self.step += 1
        self.step_state = None

    @activity.defn(name="probe_version")
    async def probe(self, ask: ProbeVersion) -> VersionProbed:
        self.happened.append(f"probe {ask.n}")
        if (away := self.probes_fail.get(ask.n)) is not None:
            raise away
        return VersionProbed(policy=ask.policy, n=ask.n, asked=8)

    @activity.defn(name="ask_general_questions")
    async def ask_base(self, ask: AskBase) -> BaseAsked:
        self.happened.append("ask the base model")
        while not self.base.is_set():
            activity.heartbeat()
            await asyncio.sleep(0.05)
        if self.base_fails is not None:
            raise self.base_fails
        self.general_unasked = False
        self.happened.append("the base model answered")
        return BaseAsked(policy=ask.policy, asked=123, known=60)

    @activity.defn(name="practise")
    async def practise(self, ask: Practise) -> Practised:
        self.happened.append("practise")
        if self.practise_fails:
            raise self.practise_fails.pop()
        if not self.idle:
            return Practised(policy=ask.policy, requests=0, more=True)
        requests, self.requests = min(self.requests, 2), max(self.requests - 2, 0)
        return Practised(policy=ask.policy, requests=requests, more=self.requests > 0)

    @activity.defn(name="decide_version")
    async def decide(self, ask: DecideVersion) -> VersionDecided:
        await self.at_gate.wait()
        if ask.not_probed:
            self.happened.append(f"not probed {ask.n}: {ask.not_probed}")
        why = self.rejects.get(ask.n)
        self.happened.append(f"decide {ask.n}: {why or 'accepted'}")
        if why is None:
            self._end(StepState.COMMITTED)
            return VersionDecided(policy=ask.policy, n=ask.n, state=StepState.COMMITTED, checks="numbers passed")
        self.step, self.step_state = ask.n + 1, None
        return VersionDecided(
            policy=ask.policy, n=ask.n, state=StepState.REJECTED, reason=f"rejected: {why}", checks="numbers failed"
        )

    @activity.defn(name="quarantine_step")
    async def quarantine(self, ask: QuarantineStep) -> None:
        self.happened.append(f"quarantine {ask.n}: {ask.reason}")
        self.paused = f"step {ask.n} quarantined: {ask.reason}"
        self.step, self.step_state = ask.n + 1, None

    @activity.defn(name="abandon_step")
    async def abandon(self, ask: AbandonStep) -> None:
        self.happened.append(f"abandon {ask.n}: {ask.reason}")
        self._end(StepState.ABANDONED)

    @activity.defn(name="publish_version")
    async def publish(self, ask: PublishVersion) -> Published:
        self.happened.append("publish begins")
        await self.engines.wait()
        reason = "" if self.pinned is None else f"v{self.pinned} is pinned"
        self.version = self.head if self.pinned is None else self.pinned
        self.happened.append(f"v{self.version} answers")
        return Published(
            policy=ask.policy,
            head=self.head,
            version=self.version,
            engines=1,
            missing=0,
            reason=reason,
            waited_seconds=0.0,
        )


class Learner:
    """One policy's workflow, notified of samples and operators' changes."""

    def __init__(self, client: Client, scripted: ScriptedLearning) -> None:
        self.client = client
        self.scripted = scripted
        self.policy = scripted.policy
        self.notifier = TemporalNotifier(client, IDLE)

    @property
    def handle(self) -> TrainingHandle:
        return self.client.get_workflow_handle_for(TrainingWorkflow.run, names.training_workflow_id(self.policy))

    async def samples(self, count: int) -> None:
        self.scripted.ready += count
        await self.notifier.notify(BatchWaits(self.policy))

    async def begin(self, **state: object) -> None:
        """Start it with these fields of its state."""
        await self.client.start_workflow(
            names.TRAINING_WORKFLOW,
            PolicyTraining(policy=self.policy).model_copy(update=state),
            id=names.training_workflow_id(self.policy),
            task_queue=names.WORKFLOW_QUEUE,
        )

    async def pause(self, reason: str) -> None:
        self.scripted.paused = reason
        await self._changed(OperatorAction.PAUSE, reason)

    async def resume(self, retry: bool = False) -> None:
        self.scripted.paused = None
        if retry:
            self.scripted.ready += self.scripted.needed
        await self._changed(OperatorAction.RESUME, "as before")

    async def roll_back(self, version: int) -> None:
        self.scripted.head = self.scripted.version = version
        self.scripted.epoch += 1
        await self._changed(OperatorAction.ROLL_BACK, f"to version {version}")

    async def pin(self, version: int | None) -> None:
        self.scripted.pinned = version
        await self._changed(OperatorAction.PIN, f"version {version}")

    async def set_recipe(self, needed: int) -> None:
        self.scripted.needed = needed
        await self._changed(OperatorAction.SET_RECIPE, "combined")

    async def _changed(self, action: OperatorAction, detail: str) -> None:
        await self.notifier.notify(OperatorChanged(self.policy, OperatorChange(action, detail)))

    async def details(self) -> str:
        """What the UI shows."""
        metadata: WorkflowMetadata = await self.handle.query(
            "__temporal_workflow_metadata", result_type=WorkflowMetadata
        )
        return metadata.current_details

    async def shows(self, words: str, seconds: float = 60) -> str:
        """The details, once these words are in them."""
        details = ""
        try:
            async with asyncio.timeout(seconds):
                while words not in (details := await self.details()):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{words!r} is not in {details!r}") from None
        return details


@asynccontextmanager
async def learning(client: Client, scripted: ScriptedLearning, *, trainer: bool = True) -> AsyncIterator[None]:
    """Workers for learning; what still runs at the end is ended."""
    async with (
        orchestrating(client, scripted.where_workflows_run, scripted.on_the_queue),
        Worker(client, task_queue=names.JUDGE_QUEUE, activities=[scripted.probe, scripted.ask_base, scripted.practise]),
    ):
        try:
            if trainer:
                async with training(client, scripted):
                    yield
            else:
                yield
        finally:
            scripted.gate.set()
            scripted.base.set()
            scripted.at_gate.set()
            scripted.engines.set()
            await end_all(client)


@asynccontextmanager
async def orchestrating(client: Client, local: Activities, queued: Activities) -> AsyncIterator[None]:
    """The workers of an orchestrator.

    Args:
        local: activities where workflows run, which are on the ledger's queue, too.
        queued: those that are on the ledger's queue alone.
    """
    async with (
        Worker(
            client,
            task_queue=names.WORKFLOW_QUEUE,
            workflows=[TrainingWorkflow],
            activities=local,
            no_remote_activities=True,
        ),
        Worker(client, task_queue=names.LEDGER_QUEUE, activities=[*local, *queued]),
    ):
        yield


@asynccontextmanager
async def training(client: Client, scripted: ScriptedLearning) -> AsyncIterator[None]:
    """A trainer."""
    queue = names.trainer_queue(scripted.pool)
    async with Worker(client, task_queue=queue, activities=[scripted.train], max_concurrent_activities=1):
        try:
            yield
        finally:
            scripted.gate.set()
