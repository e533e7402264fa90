"""Temporal as all our processes use it: one plugin for every client, and the announcer of the gateway.

Knows nothing about what workflows do. The plugin goes to clients only; workers and replayers inherit it, so they
cannot disagree about how things are written.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.common import SearchAttributePair, TypedSearchAttributes, WorkflowIDReusePolicy
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.envconfig import ClientConfig
from temporalio.plugin import SimplePlugin
from temporalio.service import PayloadLimitsConfig, RPCError
from temporalio.worker import WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from clawloop.contracts import FeedbackGiven, SessionFacts, TurnRecorded
from clawloop.errors import AnnouncementFailed, ClawloopError
from workflows import attributes
from workflows.state import SessionState

PAYLOAD_WARN_BYTES = 64 * 1024
"""Only ids, scores and reasons cross Temporal; anything larger is a mistake of ours."""

# A signal takes 10 ms; a server that needs longer than this is as good as away, and the sweep does it.
ANNOUNCE_LIMIT = timedelta(seconds=3)

# Passed through the sandbox: each module holds only definitions and constants, so two runs may share it.
PASSED_THROUGH = (
    "pydantic",  # compiled validators; importing it anew for every workflow run costs 300 ms
    "pydantic_core",
    "annotated_types",
    "typing_extensions",
    "uuid6",  # imported by clawloop.ids; workflows make no ids
    "orjson",  # imported by clawloop.turns; pure, compiled
    "clawloop",  # contracts, ids, errors and the pure rules: frozen records and functions
    "activities",  # the workflows need names and signatures; nothing runs there
    "workflows.attributes",
    "workflows.policies",
    "workflows.state",  # frozen pydantic models
)


def _runner(given: WorkflowRunner | None) -> WorkflowRunner:
    runner = given or SandboxedWorkflowRunner()
    if not isinstance(runner, SandboxedWorkflowRunner):
        return runner
    return replace(runner, restrictions=runner.restrictions.with_passthrough_modules(*PASSED_THROUGH))


class ClawloopPlugin(SimplePlugin):
    """Pydantic payloads, which errors fail a workflow, what the sandbox lets through."""

    def __init__(self) -> None:
        super().__init__(
            "clawloop",
            data_converter=pydantic_data_converter,
            workflow_runner=_runner,
            # Anything else is a bug: the workflow waits until it is mended, and goes on.
            workflow_failure_exception_types=[ClawloopError],
        )


async def connect(address: str, *, lazy: bool = False) -> Client:
    """A client; namespace, TLS and API key are read where Temporal's own tools read them.

    Args:
        lazy: connect at the first call, and again at the next when that fails.

    Raises:
        RuntimeError: nothing answers there; not if `lazy`.
    """
    config = ClientConfig.load_client_connect_config()
    config["target_host"] = address
    limits = PayloadLimitsConfig(payloads_warn_size=PAYLOAD_WARN_BYTES)
    return await Client.connect(**config, plugins=[ClawloopPlugin()], payload_limits=limits, lazy=lazy)


class TemporalAnnouncer:
    """Tells session workflows by signal-with-start, which needs Temporal's server, but no worker.

    Args:
        client: may be lazy; it connects again by itself.
        idle: after how long without a turn a session closes.
    """

    def __init__(self, client: Client, idle: timedelta) -> None:
        self._client = client
        self._idle = idle

    async def announce_turn(self, session: SessionFacts, turn: TurnRecorded) -> None:
        """
        Raises:
            AnnouncementFailed
        """
        await self._tell(session, attributes.TURN_RECORDED, turn)

    async def announce_feedback(self, session: SessionFacts, feedback: FeedbackGiven) -> None:
        """
        Raises:
            AnnouncementFailed
        """
        await self._tell(session, attributes.FEEDBACK_GIVEN, feedback)

    async def wake(self, session: SessionFacts) -> None:
        """See that the session's workflow runs, so that it closes.

        Raises:
            AnnouncementFailed
        """
        await self._tell(session, None, None)

    async def _tell(
        self, session: SessionFacts, signal: str | None, message: TurnRecorded | FeedbackGiven | None
    ) -> None:
        state = SessionState(
            session_id=session.session_id,
            policy=session.policy,
            idle_seconds=self._idle.total_seconds(),
            adapter_version=session.version,
        )
        found_by: list[SearchAttributePair[Any]] = [
            SearchAttributePair(attributes.POLICY, session.policy),
            SearchAttributePair(attributes.SESSION, str(session.session_id)),
            SearchAttributePair(attributes.STATE, "open"),
            SearchAttributePair(attributes.VERSION, session.version),
        ]
        since = f"{session.since:%Y-%m-%d %H:%M} UTC"
        try:
            await self._client.start_workflow(
                attributes.SESSION_WORKFLOW,
                state,
                id=attributes.session_workflow_id(session.session_id),
                task_queue=attributes.WORKFLOW_QUEUE,
                start_signal=signal,
                start_signal_args=[] if message is None else [message],
                # A closed session opens again under its own id.
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                search_attributes=TypedSearchAttributes(found_by),
                static_summary=f"{session.policy}: session known by {session.identified_by}, open since {since}",
                rpc_timeout=ANNOUNCE_LIMIT,
            )
        except (RPCError, RuntimeError) as error:
            # RuntimeError: a lazy client found nobody to connect to.
            raise AnnouncementFailed(f"Temporal: {' '.join(str(error).split())}") from error
