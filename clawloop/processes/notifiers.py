"""The gateway's Temporal clients: they notify workflows and ask which environments have workers."""

from __future__ import annotations

from datetime import timedelta

from temporalio.client import Client

from clawloop.operations.ports import EnvironmentWorkers, OperatorNotifier, RolloutsNotifier
from clawloop.processes.endpoints import page_links
from clawloop.processes.operations import NoTemporal
from clawloop.settings import Settings
from clawloop.temporal.client import TemporalSessionNotifier
from clawloop.temporal.environment_workers import TemporalEnvironmentWorkers
from clawloop.temporal.rollouts_notifier import TemporalRolloutsNotifier
from clawloop.temporal.training_notifier import TemporalTrainingNotifier


def notifiers_of(
    client: Client | None, settings: Settings
) -> tuple[TemporalSessionNotifier | None, OperatorNotifier, RolloutsNotifier, EnvironmentWorkers]:
    """Notifiers of sessions, training and rollouts, and the view of environment workers.

    Args:
        client: None: no Temporal is configured.
    """
    if client is None:
        return None, NoTemporal(), NoTemporal(), NoTemporal()
    idle = timedelta(minutes=settings.session_idle_minutes)
    links = page_links(settings)
    return (
        TemporalSessionNotifier(client, idle, links),
        TemporalTrainingNotifier(client, links=links),
        TemporalRolloutsNotifier(client),
        TemporalEnvironmentWorkers(client),
    )
