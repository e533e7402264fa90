"""Addresses of database and Temporal, and the engines' secret: from the settings, else as `clawloop up` left them.

Every verb imports this module, so it imports next to nothing.
"""

from __future__ import annotations

from pathlib import Path

from clawloop.app.processes.runtime_file import read_runtime_file
from clawloop.core.errors import SetupError
from clawloop.core.settings import Settings
from clawloop.operations.workflow_links import WorkflowLinks
from clawloop.serving.engine_secret import Secret, SecretFile, no_secret


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


def required_temporal_address(settings: Settings) -> str:
    """Temporal's address, as from `temporal_address`.
    Raises:
        SetupError: no Temporal is configured.
    """
    address = temporal_address(settings)
    if address is None:
        raise SetupError("no Temporal: set TEMPORAL_ADDRESS, or start `clawloop up` in another terminal")
    return address


def gateway_url(settings: Settings) -> str:
    """URL of the gateways of the last `clawloop up` on this data folder, else the one at which `up` starts them."""
    addresses = read_runtime_file(settings.data)
    return (None if addresses is None else addresses.gateway) or "http://127.0.0.1:30000"


def workflow_links(settings: Settings) -> WorkflowLinks:
    """Links into Temporal's UI: CLAWLOOP_TEMPORAL_UI, else that of the last `clawloop up` on this data folder."""
    if settings.temporal_ui is not None:
        return WorkflowLinks(settings.temporal_ui)
    # A Temporal that the operator names is not the one whose UI the file has.
    addresses = read_runtime_file(settings.data) if settings.temporal_address is None else None
    return WorkflowLinks(None if addresses is None else addresses.temporal_ui)


def engine_secret(settings: Settings) -> Secret:
    """The secret for engines: CLAWLOOP_ENGINE_SECRET, else that of CLAWLOOP_ENGINE_SECRET_FILE, else that of `clawloop
    up`'s engines, else none.

    Raises:
        SetupError: the file that holds it cannot be read, or everybody may read it.
    """
    if settings.engine_secret is not None:
        given = settings.engine_secret.get_secret_value()
        return lambda: given
    path = settings.engine_secret_file or engine_secret_file(settings.data)
    if path != settings.engine_secret_file and not path.exists():
        return no_secret
    return SecretFile(path)


def engine_secret_file(data: Path) -> Path:
    """Path of the file in which `clawloop up` keeps the secrets of the engines that it starts."""
    return data / "engine-secret"
