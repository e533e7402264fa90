"""The queue, time-outs and retries of each kind of activity call, by name; and how the ledger is called."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypedDict, TypeVar

from temporalio import workflow
from temporalio.common import Priority, RetryPolicy
from temporalio.exceptions import FailureError, is_cancelled_exception

from clawloop.core.episodes.kinds import CALL_LIMIT
from clawloop.core.episodes.running import environment_queue
from workflows.names import JUDGE_QUEUE, LEDGER_QUEUE, trainer_queue

Argument = TypeVar("Argument")
Result = TypeVar("Result")

# Errors that a retry cannot help, by the type names that cross Temporal.
_PERMANENT = (
    "PayloadSizeError",
    "RecordUnusable",
    "EpisodeUnusable",
    "TaskUnusable",
    "RecipeRejected",
    "EngineAnswerUnusable",
    "EngineRejected",
    "JudgeRefused",
    "ModelUnsupported",
    "SampleUnusable",
    "AdapterUnusable",
    "StreamsUnusable",  # a sample's per-token numbers disagree
    "NothingToTrain",
    "StepDiverged",
    "SetupError",
    "WorkerKeyRefused",
)


class ActivityOptions(TypedDict, total=False):
    """An activity's queue, time-outs and retries."""

    task_queue: str
    start_to_close_timeout: timedelta
    heartbeat_timeout: timedelta
    retry_policy: RetryPolicy


def _retries(most: timedelta, first: timedelta = timedelta(seconds=1), attempts: int = 0) -> RetryPolicy:
    """Waits that double from `first` to `most`; without `attempts` there is no end to them."""
    return RetryPolicy(
        initial_interval=first,
        maximum_interval=most,
        maximum_attempts=attempts,
        non_retryable_error_types=_PERMANENT,
    )


JUDGE = ActivityOptions(
    task_queue=JUDGE_QUEUE,
    # 2 x (one request for all votes, then one for those that cannot be read, or up to three from a judge that gives one
    # answer at a time), each at most 110 s, and a margin.
    start_to_close_timeout=timedelta(minutes=15),
    heartbeat_timeout=timedelta(seconds=30),
    # About 8 minutes in all: an engine takes one to restart. After that missing votes stay missing.
    retry_policy=_retries(timedelta(seconds=60), attempts=12),
)
"""Votes and hints of a turn."""

# Turns of one session in one activity: a backlog costs an eighth of the events, and one failure repeats few turns.
JUDGED_TOGETHER_LIMIT = 8

JUDGE_TOGETHER = ActivityOptions(
    task_queue=JUDGE_QUEUE,
    # The time for one turn after the other, 15 minutes each, though several are judged at once. A killed worker is
    # noticed by its heartbeats.
    start_to_close_timeout=JUDGED_TOGETHER_LIMIT * timedelta(minutes=15),
    heartbeat_timeout=JUDGE["heartbeat_timeout"],
    retry_policy=JUDGE["retry_policy"],
)
"""Votes and hints of several turns."""

JUDGE_EPISODE = ActivityOptions(
    task_queue=JUDGE_QUEUE,
    # All turns of an episode, one after the other; stored votes are not asked for again.
    start_to_close_timeout=timedelta(hours=1),
    heartbeat_timeout=timedelta(seconds=30),
    # About 8 minutes in all, as for a turn of a chat. After that the outcome alone is the reward.
    retry_policy=JUDGE["retry_policy"],
)
"""Votes on all turns of an episode."""

FINALIZE = ActivityOptions(
    task_queue=JUDGE_QUEUE,
    start_to_close_timeout=timedelta(minutes=2),
    heartbeat_timeout=timedelta(seconds=30),
    retry_policy=_retries(timedelta(seconds=60), attempts=10),
)
"""A turn decided with the stored votes, without a request to a judge."""

PROBE = ActivityOptions(
    task_queue=JUDGE_QUEUE,
    # Far above 200 probes on a GPU. On a CPU they may take longer: the next attempt goes on where this one was.
    start_to_close_timeout=timedelta(minutes=20),
    heartbeat_timeout=timedelta(seconds=30),
    # About 20 minutes without an engine that has the version: one restarts within a minute or two. After that the
    # version is decided without its probes, which its gate says: an engine may be away for days, and the numbers and
    # held-out turns were checked. Waiting for a judge worker does not count.
    retry_policy=_retries(timedelta(seconds=15), attempts=80),
)
"""A candidate's probes."""

ASK_BASE = ActivityOptions(
    task_queue=JUDGE_QUEUE,
    # Far above what 123 short answers take after the chats of a busy CPU: the next attempt goes on.
    start_to_close_timeout=timedelta(minutes=20),
    heartbeat_timeout=timedelta(seconds=30),
    # An engine may be away for days, and nothing but a version's probes waits for it, for a while.
    retry_policy=_retries(timedelta(seconds=60)),
)
"""The general questions, to a base model."""

PRACTISE = ActivityOptions(
    task_queue=JUDGE_QUEUE,
    # Stored replies are not asked for again, so a call that exceeds the hour loses one reply.
    start_to_close_timeout=timedelta(hours=1),
    heartbeat_timeout=timedelta(seconds=30),
    # No other work waits for practice, and the workflow asks again later.
    retry_policy=RetryPolicy(maximum_attempts=3, non_retryable_error_types=_PERMANENT),
)
"""Requests that are answered again while the engines are idle."""

STORE = ActivityOptions(
    task_queue=LEDGER_QUEUE,
    start_to_close_timeout=timedelta(minutes=2),
    # A worker that was killed is noticed by its heartbeats: training and closing go on within a minute.
    heartbeat_timeout=timedelta(seconds=15),
    # PostgreSQL may be away for long; waiting loses nothing.
    retry_policy=_retries(timedelta(seconds=30), first=timedelta(milliseconds=200)),
)
"""Reads and writes of PostgreSQL."""


class LocalActivityOptions(TypedDict, total=False):
    """A local activity's time-out and retries."""

    start_to_close_timeout: timedelta
    retry_policy: RetryPolicy


LOCAL_STORE = LocalActivityOptions(
    # The workflow's other events wait meanwhile, an operator's change among them, which is given up after 2 s; so does
    # the worker when it stops, and in a workflow's first task each other workflow that begins. A call takes 10 ms;
    # where a lock or PostgreSQL keeps it, `STORE` follows.
    start_to_close_timeout=timedelta(seconds=1),
    retry_policy=RetryPolicy(maximum_attempts=1),
)
"""Short reads and writes of PostgreSQL where the workflow runs."""


async def call_ledger(method: Callable[[Any, Argument], Awaitable[Result]], argument: Argument, summary: str) -> Result:
    """Make a short call of the ledger where the workflow runs, one after the other.

    As a local activity a call costs its workflow one event and no task of its own. What does not succeed so at once,
    e.g. while PostgreSQL is away, is made as an activity like any other, which waits without adding events, and says
    why a retry cannot help.

    Args:
        method: an idempotent activity of the ledger, which the workflows' workers have as well.

    Raises:
        ActivityError: a retry cannot help.
    """
    try:
        return await workflow.execute_local_activity_method(method, argument, summary=summary, **LOCAL_STORE)
    except FailureError as error:
        if is_cancelled_exception(error):
            raise
    return await workflow.execute_activity_method(method, argument, summary=summary, **STORE)


SWEEP = ActivityOptions(
    task_queue=LEDGER_QUEUE,
    start_to_close_timeout=timedelta(minutes=10),
    heartbeat_timeout=timedelta(seconds=30),
    # The next sweep comes within a minute.
    retry_policy=RetryPolicy(maximum_attempts=3, non_retryable_error_types=_PERMANENT),
)

ENGINE_LOAD = ActivityOptions(
    # A load may wait for long replies to end before there is a free slot.
    start_to_close_timeout=timedelta(hours=1),
    heartbeat_timeout=timedelta(seconds=15),
    # An engine takes a minute to restart; until then the load is retried every few seconds.
    retry_policy=_retries(timedelta(seconds=4), first=timedelta(milliseconds=250)),
)
"""Loads and unloads, on the queue of the engine's agent."""

ENGINE_WATCH = ActivityOptions(
    start_to_close_timeout=timedelta(hours=1),  # a watch ends by itself after half of that
    heartbeat_timeout=timedelta(seconds=15),
    retry_policy=_retries(timedelta(seconds=30)),
)
"""A watch of an engine, on the queue of its agent."""

PUBLISH = ActivityOptions(
    task_queue=LEDGER_QUEUE,
    # Publishing notifies the engines and waits 30 s for them.
    start_to_close_timeout=timedelta(minutes=2),
    heartbeat_timeout=timedelta(seconds=30),
    # Retried while no engine has the version: an engine restarts within a minute, and the old version answers.
    retry_policy=_retries(timedelta(seconds=30)),
)
"""Publishing a version."""


def train_on(pool: str) -> ActivityOptions:
    """A step on the trainers of this pool. Waiting for a trainer is not limited, and adds no events."""
    return ActivityOptions(
        task_queue=trainer_queue(pool),
        # Far above a real step: 16 samples of 2k tokens on a large model without a GPU take hours. A dead trainer
        # misses heartbeats, a wrong result exceeds the step's bounds; so this only ends a step that hangs while its
        # heartbeats go on.
        start_to_close_timeout=timedelta(hours=24),
        # The trainer sends a heartbeat every 10 s, also while it computes; the other 10 s allow for a machine that is
        # short of memory. Training waits this long for a trainer that was killed.
        heartbeat_timeout=timedelta(seconds=20),
        # A trainer that is away comes back; the claimed batch waits for it.
        retry_policy=_retries(timedelta(seconds=60)),
    )


# Pauses before the second and the third attempt at an episode or its verifier; without them all attempts meet the same
# fault: a daemon of containers restarts within seconds, a full temporary folder has room once other episodes end.
EPISODE_PAUSES = (timedelta(seconds=10), timedelta(seconds=60))
# An environment worker without a heartbeat for this long counts as dead.
EPISODE_SILENCE = timedelta(seconds=30)
# A sandbox or worker may die twice. A third failure is no accident.
EPISODE_ATTEMPTS = 3


def pause_after(attempt: int) -> timedelta:
    """The wait before an episode's next attempt."""
    return EPISODE_PAUSES[attempt - 1]


def run_in(environment: str) -> ActivityOptions:
    """An episode's agent. Never retried: what a lost sandbox did is unknown, so the workflow begins another episode."""
    return ActivityOptions(
        task_queue=environment_queue(environment),
        # Far above any task's own limit, at which the sandbox is stopped.
        start_to_close_timeout=CALL_LIMIT,
        heartbeat_timeout=EPISODE_SILENCE,
        retry_policy=RetryPolicy(maximum_attempts=1),
    )


VERIFY_FIRST = Priority(priority_key=1)
"""Priority of verifiers over agents that wait for a place on the same worker, which takes up to an episode's time."""


def verify_in(environment: str) -> ActivityOptions:
    """An episode's verifier, which reads what the agent left and can be repeated."""
    return ActivityOptions(
        task_queue=environment_queue(environment),
        start_to_close_timeout=CALL_LIMIT,
        heartbeat_timeout=EPISODE_SILENCE,
        # Without a reward after that the episode is unscored, and the group is settled by the others.
        retry_policy=RetryPolicy(
            initial_interval=pause_after(1),
            backoff_coefficient=pause_after(2) / pause_after(1),
            maximum_attempts=EPISODE_ATTEMPTS,
            non_retryable_error_types=_PERMANENT,
        ),
    )
