"""The notifier of workflows, by a process's settings."""

from __future__ import annotations

from datetime import timedelta

from temporalio.client import Client

from clawloop.app.processes.endpoints import page_links
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.core.settings import Settings


def notifier_on(client: Client, settings: Settings) -> TemporalNotifier:
    return TemporalNotifier(client, timedelta(minutes=settings.session_idle_minutes), page_links(settings))
