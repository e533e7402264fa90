"""How long our activities may take, and how often they are tried. Names, not numbers, stand in workflows."""

from __future__ import annotations

from datetime import timedelta
from typing import TypedDict

from temporalio.common import RetryPolicy

from workflows.names import JUDGE_QUEUE, LEDGER_QUEUE, trainer_queue

# What cannot get better by trying again, by the type names that cross Temporal.
_PERMANENT = (
    "PayloadSizeError",
    "RecordUnusable",
    "RecipeRejected",
    "EngineAnswerUnusable",
    "EngineRejected",
    "JudgeRefused",
    "ModelUnsupported",
    "SampleUnusable",
    "AdapterUnusable",
    "StreamsUnusable",
    "NothingToTrain",
    "StepDiverged",
    "SetupError",
)


class Policy(TypedDict, total=False):
    """Where an activity runs, how long it may take, how often it is tried."""

    task_queue: str
    start_to_close_timeout: timedelta
    heartbeat_timeout: timedelta
    retry_policy: RetryPolicy


JUDGE = Policy(
    task_queue=JUDGE_QUEUE,
    # 2 x (one request for all, then up to three by themselves), each at most 110 s, and room.
    start_to_close_timeout=timedelta(minutes=15),
    heartbeat_timeout=timedelta(seconds=30),
    # About 8 minutes in all: an engine takes one to restart. After that what is missing stays missing.
    retry_policy=RetryPolicy(
        initial_interval=timedelta(seconds=1),
        backoff_coefficient=2.0,
        maximum_interval=timedelta(seconds=60),
        maximum_attempts=12,
        non_retryable_error_types=_PERMANENT,
    ),
)
"""Votes and hints of a turn."""

FINALIZE = Policy(
    task_queue=JUDGE_QUEUE,
    start_to_close_timeout=timedelta(minutes=2),
    heartbeat_timeout=timedelta(seconds=30),
    retry_policy=RetryPolicy(
        initial_interval=timedelta(seconds=1),
        backoff_coefficient=2.0,
        maximum_interval=timedelta(seconds=60),
        maximum_attempts=10,
        non_retryable_error_types=_PERMANENT,
    ),
)
"""A turn's end without asking anybody any more."""

STORE = Policy(
    task_queue=LEDGER_QUEUE,
    start_to_close_timeout=timedelta(minutes=2),
    # PostgreSQL may be away for long; nothing is lost by waiting for it.
    retry_policy=RetryPolicy(
        initial_interval=timedelta(milliseconds=200),
        backoff_coefficient=2.0,
        maximum_interval=timedelta(seconds=30),
        non_retryable_error_types=_PERMANENT,
    ),
)
"""Reads and writes of PostgreSQL."""

SWEEP = Policy(
    task_queue=LEDGER_QUEUE,
    start_to_close_timeout=timedelta(minutes=10),
    heartbeat_timeout=timedelta(seconds=30),
    # The next sweep comes within a minute.
    retry_policy=RetryPolicy(maximum_attempts=3, non_retryable_error_types=_PERMANENT),
)

ENGINE_LOAD = Policy(
    # It waits for long replies to end before it loads one more version.
    start_to_close_timeout=timedelta(hours=1),
    heartbeat_timeout=timedelta(seconds=15),
    # An engine takes a minute to restart; until then it is asked every few seconds.
    retry_policy=RetryPolicy(
        initial_interval=timedelta(milliseconds=250),
        backoff_coefficient=2.0,
        maximum_interval=timedelta(seconds=4),
        non_retryable_error_types=_PERMANENT,
    ),
)
"""Versions into an engine and out of it, on the queue of its agent."""

ENGINE_WATCH = Policy(
    start_to_close_timeout=timedelta(hours=1),  # it ends by itself after half of that
    heartbeat_timeout=timedelta(seconds=15),
    retry_policy=RetryPolicy(
        initial_interval=timedelta(seconds=1),
        backoff_coefficient=2.0,
        maximum_interval=timedelta(seconds=30),
        non_retryable_error_types=_PERMANENT,
    ),
)
"""An engine watched until something changes."""

PUBLISH = Policy(
    task_queue=LEDGER_QUEUE,
    # It waits 30 s for engines, and wakes them.
    start_to_close_timeout=timedelta(minutes=2),
    heartbeat_timeout=timedelta(seconds=30),
    # While no engine has the version it is tried again: an engine restarts within a minute, and the old one answers.
    retry_policy=RetryPolicy(
        initial_interval=timedelta(seconds=1),
        backoff_coefficient=2.0,
        maximum_interval=timedelta(seconds=30),
        non_retryable_error_types=_PERMANENT,
    ),
)
"""A version onto the engines, and the flip."""


def train_on(pool: str) -> Policy:
    """A step on the trainers of this pool. Waiting for one of them is not limited, and leaves no trace."""
    return Policy(
        task_queue=trainer_queue(pool),
        # Far above a real step: 16 samples of 2k tokens on a large model without a GPU take hours. A dead trainer is
        # seen by its heartbeat, a wrong result by the step's own bounds; so this only ends what hangs and still beats.
        start_to_close_timeout=timedelta(hours=24),
        # The trainer beats each few seconds, also while it computes; 30 s are a machine that is short of memory.
        heartbeat_timeout=timedelta(seconds=30),
        # A trainer that is away comes back; the batch is claimed and waits for it.
        retry_policy=RetryPolicy(
            initial_interval=timedelta(seconds=1),
            backoff_coefficient=2.0,
            maximum_interval=timedelta(seconds=60),
            non_retryable_error_types=_PERMANENT,
        ),
    )
