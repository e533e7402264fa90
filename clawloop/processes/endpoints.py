"""Where the database and Temporal are that a command is about. Every verb asks, so this imports next to nothing."""

from __future__ import annotations

from clawloop.errors import SetupError
from clawloop.processes.runtime_file import read_running
from clawloop.settings import Settings


def database_url(settings: Settings) -> str:
    """The database this command is about: the one given, or that of the `clawloop up` that runs on this data.

    Raises:
        SetupError: neither is there.
    """
    if settings.database_url is not None:
        return settings.database_url
    running = read_running(settings.data)
    if running is None:
        raise SetupError(
            f"no database: set DATABASE_URL, or start `clawloop up --data {settings.data}` in another terminal"
        )
    return running.database_url


def temporal_address(settings: Settings) -> str | None:
    """The Temporal this command is about: the one given, or that of the `clawloop up` that runs on this data."""
    if settings.temporal_address is not None:
        return settings.temporal_address
    running = read_running(settings.data)
    return None if running is None else running.temporal_address
