"""Temporal as all processes use it: one plugin for every client.

The plugin is given to clients only; workers and replayers inherit it, so that all use the same data converter.
"""

from __future__ import annotations

import logging
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from temporalio.client import Client
from temporalio.contrib.pydantic import PydanticPayloadConverter
from temporalio.converter import DataConverter
from temporalio.envconfig import ClientConfig
from temporalio.exceptions import ApplicationError
from temporalio.plugin import SimplePlugin
from temporalio.service import KeepAliveConfig, PayloadLimitsConfig
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
    UnsandboxedWorkflowRunner,
    WorkerConfig,
    WorkflowRunner,
)
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from clawloop.core.errors import (
    AdapterUnreadable,
    ClawloopError,
    EncryptionKeyMissing,
    EpisodeUnusable,
    JudgeRefused,
    JudgeUnavailable,
    PermanentError,
    SandboxFailed,
    TrainerUnavailable,
    WorkerKeyRefused,
)
from clawloop.core.telemetry.tracing import tracer

log = logging.getLogger(__name__)

PAYLOAD_WARN_BYTES = 64 * 1024
"""Only ids, scores and reasons cross Temporal; anything larger is a mistake of ours."""

# An activity beats at half its time-out; by default the SDK holds beats back for 0.8 of it (measured), and then a busy
# machine that is late by a fifth loses the work.
BEATS_APART = timedelta(seconds=0.5)

# A client hears nothing of a silent connection (a peer that lost its network), so it asks. By the SDK's 30 and 15 s
# a training step came 82 s late. Temporal's frontend closes connections that ask more often than every 10 s.
_ASK_IF_ALIVE = KeepAliveConfig(interval_millis=15_000, timeout_millis=5_000)

# Passed through the sandbox: each module holds only definitions and constants, so two runs may share it.
PASSED_THROUGH = (
    "pydantic",  # compiled validators; importing it for every workflow run costs 300 ms
    "pydantic_core",
    "annotated_types",
    "typing_extensions",
    "uuid6",  # imported by clawloop.core.ids; workflows make no ids
    "orjson",  # imported by clawloop.core.turns; pure, compiled
    "clawloop",  # contracts, ids, errors and the pure rules: frozen records and functions
    "activities",  # workflows need names and signatures only
    "workflows.names",
    "workflows.activity_options",
    "workflows.state",  # pydantic models; a run never shares an instance with another
)


def _runner(sandboxed: bool) -> WorkflowRunner:
    if not sandboxed:
        return UnsandboxedWorkflowRunner()
    restrictions = SandboxRestrictions.default.with_passthrough_modules(*PASSED_THROUGH)
    return SandboxedWorkflowRunner(restrictions)


_SAFE = (
    JudgeUnavailable
    | JudgeRefused
    | TrainerUnavailable
    | AdapterUnreadable
    | SandboxFailed
    | EpisodeUnusable
    | WorkerKeyRefused
    | EncryptionKeyMissing
)


class _RedactErrors(ActivityInboundInterceptor):
    """Replaces the message of an activity's error by its type before it crosses Temporal.

    A message may quote a conversation (PostgreSQL quotes the row it refuses), so it stays in our logs. Messages of
    judges, trainers, adapters, sandboxes, episodes and missing keys are safe by contract, and operators need them.
    """

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        try:
            return await super().execute_activity(input)
        except ApplicationError:
            raise
        except Exception as error:  # noqa: BLE001  no message of any error may cross
            kind = type(error).__name__
            is_safe = isinstance(error, _SAFE)
            log.warning(
                "activity failed",
                extra={"error": kind, "where": _where(error), "why": str(error) if is_safe else None},
            )
            wait = error.retry_after_seconds if isinstance(error, JudgeUnavailable) else None
            raise ApplicationError(
                str(error) if is_safe else kind,
                type=kind,
                non_retryable=isinstance(error, PermanentError),
                next_retry_delay=None if wait is None else timedelta(seconds=wait),
            ) from None


class _RedactErrorsInterceptor(Interceptor):
    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        return _RedactErrors(next)


def _tracing() -> list[Interceptor]:
    """Interceptors for spans of signals, workflows and activities, outside the redaction of errors; none by default."""
    if (own := tracer()) is None:
        return []
    from temporalio.contrib.opentelemetry import TracingInterceptor

    return [TracingInterceptor(own)]


def _where(error: BaseException) -> str:
    """The innermost frames of the traceback, without the message."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))


class _SharedPayloadConverter(PydanticPayloadConverter):
    """The SDK makes a converter for each workflow run, and one that is new compiles each type's validator again."""

    _shared: ClassVar[PydanticPayloadConverter | None] = None

    def __new__(cls) -> Self:
        if cls._shared is None:
            made = cls._shared = super().__new__(cls)
            PydanticPayloadConverter.__init__(made)
        return cast(Self, cls._shared)

    def __init__(self) -> None:
        """Nothing: `__new__` has done it, once."""


class ClawloopPlugin(SimplePlugin):
    """Pydantic payloads, which errors fail a workflow, what of them crosses, what the sandbox lets through, beats.

    Args:
        sandboxed: workflows run in the SDK's sandbox, which refuses what differs from run to run: clocks, random
            numbers, files. It imports a workflow's module for each run, half of a busy orchestrator's CPU, so only
            replays use it: of the saved histories in the tests, and of open workflows by `clawloop check replay`.
    """

    def __init__(self, *, sandboxed: bool = False) -> None:
        super().__init__(
            "clawloop",
            data_converter=DataConverter(payload_converter_class=_SharedPayloadConverter),
            workflow_runner=_runner(sandboxed),
            interceptors=[*_tracing(), _RedactErrorsInterceptor()],
            # Anything else is a bug: the workflow waits until it is mended, and goes on.
            workflow_failure_exception_types=[ClawloopError],
        )

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        """Each beat goes out as it comes."""
        config["max_heartbeat_throttle_interval"] = BEATS_APART
        return super().configure_worker(config)


async def connect(address: str, *, lazy: bool = False) -> Client:
    """A client; namespace, TLS and API key are read where Temporal's own tools read them.

    Args:
        lazy: connect at the first call, and at each further call after a failure.

    Raises:
        RuntimeError: nothing answers there; not if `lazy`.
    """
    config = ClientConfig.load_client_connect_config()
    config["target_host"] = address
    limits = PayloadLimitsConfig(payloads_warn_size=PAYLOAD_WARN_BYTES)
    return await Client.connect(
        **config, plugins=[ClawloopPlugin()], payload_limits=limits, lazy=lazy, keep_alive_config=_ASK_IF_ALIVE
    )
