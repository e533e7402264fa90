"""Addresses of database and Temporal: from the settings, else from the runtime file of `clawloop up`.

Every verb imports this module, so it imports next to nothing.
"""

from __future__ import annotations

from clawloop.errors import SetupError
from clawloop.processes.runtime_file import read_runtime_file
from clawloop.settings import Settings


def database_url(settings: Settings) -> str:
    """URL of the database: DATABASE_URL, else that of the last `clawloop up` on this data folder.

    Raises:
        SetupError: there is neither.
    """
    if settings.database_url is not None:
        return settings.database_url
    addresses = read_runtime_file(settings.data)
    if addresses is None:
        raise SetupError(
            f"no database: set DATABASE_URL, or start `clawloop up --data {settings.data}` in another terminal"
        )
    return addresses.database_url


def temporal_address(settings: Settings) -> str | None:
    """Address of Temporal: TEMPORAL_ADDRESS, else that of the last `clawloop up` on this data folder, else None."""
    if settings.temporal_address is not None:
        return settings.temporal_address
    addresses = read_runtime_file(settings.data)
    return None if addresses is None else addresses.temporal_address
