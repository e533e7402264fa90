"""What workflows tell and continue with; signals and deadlines of Temporal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import cast
from uuid import uuid4

import pytest
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    RetryState,
    TerminatedError,
    TimeoutError,
    TimeoutType,
)
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import SlotMarkUsedContext, SlotPermit, SlotReleaseContext, SlotReserveContext

from activities.judging.judge_turn import WHY_LIMIT
from activities.notify import CONCURRENCY, MAX_FAILED, ConcurrentNotifier, TrainingNotifier
from activities.serving.engines import EngineReconciler
from activities.training.train_step import StepDone
from clawloop.app.cli.remote_environment import _parser, worker_of
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.plugin import PAYLOAD_WARN_BYTES, connect
from clawloop.app.temporal.replay import ReplaySlots
from clawloop.app.temporal.server import temporal_deadline
from clawloop.core.contracts.notices import BatchWaits, EngineAdded, EngineRemoved, Notice, OperatorChanged
from clawloop.core.contracts.serving import Engine
from clawloop.core.contracts.sessions import FeedbackGiven, RejudgeRequested, TurnRecorded, TurnResult
from clawloop.core.contracts.training import (
    Claim,
    OperatorAction,
    OperatorChange,
    StepState,
    TrainingState,
    TrainingView,
)
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.episodes.keys import KEY_LIFETIME
from clawloop.core.episodes.kinds import KEY_LEAST_LEFT, LONGEST_SECONDS
from clawloop.core.errors import SetupError, SignalFailed
from clawloop.core.ids import SessionId, new_feedback_id, new_turn_id
from clawloop.environments.gateway import PATIENCE_SECONDS
from clawloop.environments.verifiers.loading import seconds_in_all
from clawloop.sandboxes.containers import PULL_SECONDS
from tests.fakes.ledger import FakeLedger
from tests.fakes.publishing_store import FakePublishingStore
from workflows.activity_options import run_in, verify_in
from workflows.descriptions import training_headline, training_table
from workflows.long_running import reason_of
from workflows.state import INBOX_LIMIT, KNOWN_LIMIT, ROWS_LIMIT, SessionState, kept_for_next_run

# The state that a session's workflow continues with stays far below Temporal's limit.


def full() -> SessionState:
    row = TurnResult(
        turn_id=new_turn_id(),
        number=123_456,
        kind="main",
        outcome=TurnOutcome.NOT_TRAINABLE,
        verdict=-1,
        sample=False,
        step=123_456,
        why="−" * WHY_LIMIT,
    )
    message = FeedbackGiven(new_feedback_id(), new_turn_id())
    return SessionState(
        session_id=SessionId(uuid4()),
        policy="p" * 200,
        idle_seconds=1800.0,
        adapter_version=123_456,
        known=[new_turn_id() for _ in range(KNOWN_LIMIT)],
        carried=[
            TurnRecorded(new_turn_id(), 7, True),
            RejudgeRequested(new_turn_id(), 2),
            *[message] * (INBOX_LIMIT - 2),
        ],
        rows=[row] * ROWS_LIMIT,
        deadline=datetime.now(UTC),
    )


def test_a_full_state_is_a_small_payload() -> None:
    assert len(full().model_dump_json().encode()) < PAYLOAD_WARN_BYTES


def test_carried_messages_keep_their_types() -> None:
    state = full()
    assert SessionState.model_validate_json(state.model_dump_json()) == state


def turns(count: int) -> list[TurnRecorded]:
    return [TurnRecorded(new_turn_id(), 0, False, False) for _ in range(count)]


def pieces_of_feedback(count: int) -> list[FeedbackGiven]:
    return [FeedbackGiven(new_feedback_id(), new_turn_id()) for _ in range(count)]


@pytest.mark.parametrize("count", [0, 1, INBOX_LIMIT])
def test_the_next_run_takes_over_all_messages_up_to_a_limit(count: int) -> None:
    messages = turns(count)
    assert kept_for_next_run(messages) == messages


def test_of_too_many_messages_the_oldest_turns_are_left_to_the_closing() -> None:
    """It reads them in PostgreSQL; it knows nothing of feedback and of an operator's requests."""
    old, feedback, new = turns(30), pieces_of_feedback(3), turns(INBOX_LIMIT - 10)
    request = RejudgeRequested(new_turn_id(), 1)
    kept = kept_for_next_run([*old[:10], *feedback, *old[10:], request, *new])
    assert kept == [*feedback, *old[-6:], request, *new]
    assert len(kept) == INBOX_LIMIT


def test_of_too_much_feedback_the_newest_is_taken_over() -> None:
    feedback = pieces_of_feedback(INBOX_LIMIT + 5)
    assert kept_for_next_run([*turns(5), *feedback]) == feedback[5:]


# What the Temporal UI shows of training.

SINCE = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
VIEW = TrainingView(
    policy="default",
    pool="default",
    state=TrainingState.WAITING,
    reason="",
    ready=5,
    needed=16,
    judging=3,
    oldest_seconds=None,
    step=7,
    step_state=None,
    head=6,
    version=6,
    epoch=0,
    pinned=None,
    unpublished=False,
    max_wait_seconds=None,
    closed_seconds=None,
    probed=False,
    general_unasked=False,
    canary=None,
    canary_parent=None,
    progress=None,
)
BATCH = Claim(policy="default", n=7, state=StepState.CLAIMED, samples=16)


@pytest.mark.parametrize(
    ("view", "computing", "publishing", "headline"),
    [
        (None, None, True, "reading the ledger"),
        (
            VIEW,
            None,
            False,
            "waiting: 5 of 16 samples, 3 turns are being judged\n\nv6 answers, the newest",
        ),
        (
            VIEW,
            BATCH,
            True,
            "step 7: 16 samples, from v6, queued for trainer-default at 2026-01-02 03:04 UTC\n\n"
            "v6 answers, engines are loading the newest",
        ),
        (
            replace(VIEW, state=TrainingState.PAUSED, reason="paused: for now", version=5),
            None,
            False,
            "paused: for now\n\nv5 answers, v6 is trained",
        ),
        (
            replace(VIEW, step_state=StepState.CLAIMED, pinned=6),
            None,
            False,
            "step 7: its batch is claimed\n\nv6 answers, pinned",
        ),
        (
            replace(VIEW, step_state=StepState.CANDIDATE),
            None,
            False,
            "step 7: its version is at the gate\n\nv6 answers, the newest",
        ),
    ],
)
def test_the_headline_shows_what_training_does_and_which_version_answers(
    view: TrainingView | None, computing: Claim | None, publishing: bool, headline: str
) -> None:
    assert training_headline(view, computing, SINCE, publishing, []) == headline
    assert (
        training_headline(view, computing, SINCE, publishing, ["PostgreSQL call failed: x"])
        == f"{headline}\n\nPostgreSQL call failed: x"
    )


def test_a_bar_in_a_reason_does_not_break_the_table_and_unknown_figures_are_empty() -> None:
    bad = StepDone(policy="default", n=6, state=StepState.QUARANTINED, reason="KL | over\nbound")
    good = StepDone(policy="default", n=7, state=StepState.COMMITTED, samples=16, loss=0.123456, kl=0.0, seconds=2.04)
    good = good.model_copy(update={"gate": "numbers passed"})
    assert training_table([], None) == "No step is done yet."
    assert training_table([bad, good], 7).splitlines()[2:] == [
        "| 6 |  |  |  |  |  |  | quarantined: KL / over bound |  |",
        "| 7 | 16 | 0.1235 | 0 |  | 2.0 | numbers passed | committed | yes |",
    ]
    assert "yes" not in training_table([bad], 6)


# Policies are notified of waiting batches one by one: a failed signal does not stop the others.


class Work:
    """Satisfies `activities.notify.WorkStore` and `Notifier`.

    Args:
        pending: policies with work that were not notified.
        failing: policies whose workflow cannot be notified.
    """

    def __init__(self, pending: set[str], failing: set[str]) -> None:
        self.pending = pending
        self.failing = failing

    async def pending_work(self, age: timedelta) -> list[str]:
        del age
        return sorted(self.pending)

    async def mark_work_notified(self, policies: Sequence[str]) -> None:
        self.pending -= set(policies)

    async def notify(self, notice: Notice) -> None:
        assert isinstance(notice, BatchWaits)
        if notice.policy in self.failing:
            raise SignalFailed("Temporal: too many signals")


async def notify_each(names: Iterable[str], notify: Callable[[str], Awaitable[None]]) -> None:
    notifier = ConcurrentNotifier[str]("policy")
    await notifier.notify_each(list(names), str, notify)
    notifier.raise_if_any_failed()


async def test_a_failed_signal_to_a_policy_does_not_stop_the_others_and_is_named() -> None:
    work = Work(pending={"ada", "bob", "cyd"}, failing={"ada", "cyd"})
    notifier = TrainingNotifier(work, work)
    with pytest.raises(SignalFailed, match=r"^policy ada: Temporal: too many signals; policy cyd: Temporal: "):
        await notifier.notify_pending()
    assert work.pending == {"ada", "cyd"}
    work.failing = set()
    assert await notifier.notify_pending() == 2
    assert work.pending == set()


async def test_a_batch_whose_signal_failed_is_left_to_the_sweep() -> None:
    work = Work(pending={"ada", "bob"}, failing={"ada"})
    notifier = TrainingNotifier(work, work)
    for policy in ("ada", "bob", None):
        await notifier.notify(policy)
    assert work.pending == {"ada"}


async def test_no_more_than_the_limit_are_notified_concurrently() -> None:
    now, most = 0, 0

    async def notify(name: str) -> None:
        nonlocal now, most
        del name
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1

    await notify_each(map(str, range(5 * CONCURRENCY)), notify)
    assert most == CONCURRENCY


async def test_after_too_many_failures_the_rest_is_left_to_the_next_sweep() -> None:
    tried: list[str] = []

    async def notify(name: str) -> None:
        tried.append(name)
        await asyncio.sleep(0)
        raise SignalFailed("Temporal: deadline exceeded")

    with pytest.raises(SignalFailed):
        await notify_each(map(str, range(20 * CONCURRENCY)), notify)
    assert MAX_FAILED < len(tried) <= MAX_FAILED + CONCURRENCY


async def test_a_slow_workflow_does_not_delay_the_others() -> None:
    others, notified = asyncio.Barrier(4), list[str]()

    async def notify(name: str) -> None:
        await others.wait()
        notified.append(name)

    async with asyncio.timeout(30):  # each waits for the three others: one after the other, none would ever end
        await notify_each(["ada", "bob", "cyd", "dan"], notify)
    assert sorted(notified) == ["ada", "bob", "cyd", "dan"]


# Engines' workflows are reconciled one by one: a failed signal does not stop the others.


class Workflows:
    """Satisfies `Notifier`.

    Args:
        failing: engines whose workflow cannot be signalled.
    """

    def __init__(self, running: set[str], failing: set[str]) -> None:
        self.engines = running
        self.failing = failing

    async def running(self) -> frozenset[str]:
        return frozenset(self.engines)

    async def notify(self, notice: Notice) -> None:
        assert isinstance(notice, EngineAdded | EngineRemoved)
        if notice.engine_id in self.failing:
            raise SignalFailed("Temporal: too many signals")
        if isinstance(notice, EngineAdded):
            self.engines.add(notice.engine_id)
        else:
            self.engines.remove(notice.engine_id)


async def test_a_failed_signal_to_an_engine_does_not_stop_the_others_and_is_named() -> None:
    ledger = FakeLedger(engines={one: Engine(one, f"http://{one}", {}, draining=False) for one in ("a", "b", "c")})
    workflows = Workflows(running={"c", "x", "y"}, failing={"a", "x"})
    reconciler = EngineReconciler(FakePublishingStore(ledger), workflows, workflows.running)
    with pytest.raises(SignalFailed, match=r"^engine a: Temporal: too many signals; engine x: Temporal: "):
        await reconciler.reconcile()
    assert workflows.engines == {"b", "c", "x"}
    workflows.failing = set()
    assert await reconciler.reconcile() == 2
    assert workflows.engines == {"a", "b", "c"}


# Each way in which Temporal may not answer.


@pytest.fixture
async def silent_server() -> AsyncIterator[str]:
    """The address of a server that accepts connections and never answers."""
    gone = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        await gone.wait()
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"{host}:{port}"
    gone.set()
    server.close()


@pytest.mark.slow
async def test_a_server_that_never_answers_is_not_waited_for_beyond_the_limit(silent_server: str) -> None:
    notifier = TemporalNotifier(await connect(silent_server, lazy=True), timedelta(hours=1))
    # The SDK alone gives up after 30 s.
    async with asyncio.timeout(20):
        with pytest.raises(SignalFailed, match="Temporal: Timeout"):
            await notifier.notify(OperatorChanged("default", OperatorChange(OperatorAction.PAUSE, "why")))
        with pytest.raises(SignalFailed, match="Temporal: no answer within 3 s"):
            await notifier.notify(BatchWaits("default"))


def not_found() -> RPCError:
    return RPCError("workflow not found", RPCStatusCode.NOT_FOUND, b"")


async def test_refused_and_failed_calls_raise_one_error_with_the_message() -> None:
    for error in (not_found(), RuntimeError("failed\n to  connect")):
        with pytest.raises(SignalFailed, match=r"Temporal: (workflow not found|failed to connect)"):
            async with temporal_deadline():
                raise error


async def test_only_a_missing_workflow_is_ignored() -> None:
    async with temporal_deadline(may_be_gone=True):
        raise not_found()
    with pytest.raises(SignalFailed):
        async with temporal_deadline(may_be_gone=True):
            raise RPCError("no", RPCStatusCode.PERMISSION_DENIED, b"")


async def test_cancellation_is_not_taken_for_a_time_out() -> None:
    async def call() -> None:
        async with temporal_deadline(timedelta(hours=1)):
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# Which workflow tasks count as replays, and which polls wait for them.


@dataclass
class Poll:
    """What the SDK's core says of a poll."""

    is_sticky: bool


@dataclass
class Task:
    """What the SDK's core says of a workflow task."""

    is_sticky: bool
    workflow_type: str = "Session"


@dataclass
class Used:
    slot_info: Task
    permit: SlotPermit


class Worker:
    """Asks for slots as the SDK's core does; every call has ended when its method returns."""

    def __init__(self, replays: int) -> None:
        self.slots = ReplaySlots(replays)

    async def poll(self, *, own_queue: bool = False) -> SlotPermit | None:
        """None: no slot is free."""
        asking = asyncio.create_task(self.slots.reserve_slot(cast(SlotReserveContext, Poll(own_queue))))
        await self._settle()
        if asking.done():
            return asking.result()
        asking.cancel()
        await self._settle()
        return None

    async def begin(self, permit: SlotPermit, *, with_history: bool) -> None:
        self.slots.mark_slot_used(cast(SlotMarkUsedContext, Used(Task(is_sticky=not with_history), permit)))
        await self._settle()

    async def end(self, permit: SlotPermit) -> None:
        self.slots.release_slot(SlotReleaseContext(None, permit))
        await self._settle()

    async def replay(self, *, own_queue: bool = False) -> SlotPermit:
        permit = await self.poll(own_queue=own_queue)
        assert permit is not None
        await self.begin(permit, with_history=True)
        return permit

    async def news(self) -> SlotPermit:
        """Take a task of a workflow in memory."""
        permit = await self.poll(own_queue=True)
        assert permit is not None
        await self.begin(permit, with_history=False)
        return permit

    @staticmethod
    async def _settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def worker() -> Worker:
    return Worker(2)


async def test_no_more_histories_are_replayed_at_once(worker: Worker) -> None:
    first, _ = await worker.replay(), await worker.replay()
    assert await worker.poll() is None
    await worker.end(first)
    assert await worker.poll() is not None
    assert await worker.poll() is None


async def test_replays_do_not_hold_up_workflows_in_memory(worker: Worker) -> None:
    for _ in range(2):
        await worker.replay()
    assert await worker.poll(own_queue=True) is not None


async def test_a_hundred_tasks_of_workflows_in_memory_run_at_once(worker: Worker) -> None:
    """Also while local activities keep them open, as where PostgreSQL hangs. Polls that are given up take nothing."""
    held = [await worker.news() for _ in range(100)]
    for _ in range(3):
        assert await worker.poll(own_queue=True) is None
        assert await worker.poll() is None
    await worker.end(held[0])
    await worker.end(held[1])
    assert await worker.poll() is not None
    assert await worker.poll(own_queue=True) is not None


async def test_histories_that_the_workers_own_queue_brings_hold_up_its_further_polls(worker: Worker) -> None:
    replays = [await worker.replay(own_queue=True) for _ in range(3)]
    assert await worker.poll(own_queue=True) is None
    assert await worker.poll() is not None
    await worker.end(replays[0])
    assert await worker.poll(own_queue=True) is not None


async def test_a_poll_that_finds_a_workflow_in_memory_leaves_its_replay_to_others(worker: Worker) -> None:
    for _ in range(3):
        permit = await worker.poll()
        assert permit is not None
        await worker.begin(permit, with_history=False)
    await worker.replay()
    await worker.replay()
    assert await worker.poll() is None


async def test_a_poll_that_ends_without_a_task_is_given_back_once(worker: Worker) -> None:
    for _ in range(5):
        permit = await worker.poll()
        assert permit is not None
        await worker.end(permit)
    await worker.replay()
    await worker.replay()
    assert await worker.poll() is None


async def test_a_poll_that_is_given_up_while_it_waits_takes_nothing(worker: Worker) -> None:
    for _ in range(200):
        held = [await worker.replay(), await worker.replay()]
        assert await worker.poll() is None
        for permit in held:
            await worker.end(permit)
    assert len([await worker.replay() for _ in range(2)]) == 2


@pytest.fixture
def closed_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


async def test_what_ends_after_its_event_loop_is_ignored(closed_loop: asyncio.AbstractEventLoop) -> None:
    """The core's threads may end later than the worker, and log whatever a supplier raises."""
    slots = ReplaySlots(1)
    reserving = slots.reserve_slot(cast(SlotReserveContext, Poll(is_sticky=False)))
    permit = await asyncio.to_thread(closed_loop.run_until_complete, reserving)
    closed_loop.close()
    slots.release_slot(SlotReleaseContext(None, permit))


# Why an activity failed, in words.


def failed(cause: BaseException | None) -> ActivityError:
    error = ActivityError(
        "Activity task failed",
        scheduled_event_id=1,
        started_event_id=2,
        identity="",
        activity_type="judge_turn",
        activity_id="1",
        retry_state=RetryState.MAXIMUM_ATTEMPTS_REACHED,
    )
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("kind", list(TimeoutType))
def test_a_timeout_is_described_in_words(kind: TimeoutType) -> None:
    said = reason_of(failed(TimeoutError("timed out", type=kind, last_heartbeat_details=[])))
    assert " " in said
    assert "Error" not in said


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (TimeoutError("timed out", type=TimeoutType.HEARTBEAT, last_heartbeat_details=[]), "its worker fell silent"),
        (TimeoutError("timed out", type=None, last_heartbeat_details=[]), "it did not end in time"),
        (ApplicationError("the judge answered 500", type="JudgeUnavailable"), "the judge answered 500"),
        (CancelledError("cancelled"), "it was cancelled"),
        (TerminatedError("terminated"), "TerminatedError"),
        (None, "ActivityError"),
    ],
)
def test_the_reason_names_the_failure(cause: BaseException | None, said: str) -> None:
    assert reason_of(failed(cause)) == said


# What an episode is given in time is what it gets: the calls around it and its key end later.


def test_calls_and_keys_outlast_the_longest_agent_and_verifier_that_are_accepted() -> None:
    longest = timedelta(seconds=LONGEST_SECONDS + PULL_SECONDS + 2 * PATIENCE_SECONDS)
    for options in (run_in("terminal"), verify_in("terminal")):
        assert options["start_to_close_timeout"] > longest
    assert KEY_LIFETIME > KEY_LEAST_LEFT > longest


def stages(rollout: float | None) -> SimpleNamespace:
    return SimpleNamespace(setup=None, rollout=rollout, finalize=600.0, scoring=60)


def test_stages_of_verifiers_that_an_episode_cannot_hold_are_refused_with_their_sum() -> None:
    assert seconds_in_all(stages(900), "agent", "sums") == 60 + 600 + 900 + 600 + 60
    why = (
        "--verifiers sums: the stages setup, rollout, finalize and scoring may take 15660 s together, and an episode"
        " 14400: lower `agent.timeout` in --verifiers-config, or --seconds"
    )
    with pytest.raises(SetupError) as refused:
        seconds_in_all(stages(14_400), "agent", "sums")
    assert str(refused.value) == why
    with pytest.raises(SetupError, match="nan s together"):
        seconds_in_all(stages(float("nan")), "agent", "sums")


@pytest.mark.parametrize("seconds", ["14401", "0", "-1", "nan", "inf"])
def test_seconds_of_an_agent_are_bounded(seconds: str) -> None:
    options = ["--verifiers", "sums", f"--seconds={seconds}", "--temporal", "t:7233"]
    with pytest.raises(SetupError, match=f"^--seconds must be above 0 and at most 14400, not {float(seconds):g}$"):
        worker_of(_parser().parse_args(options), {"CLAWLOOP_WORKER_KEY": "key"})
