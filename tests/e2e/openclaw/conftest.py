"""The real OpenClaw in front of real gateways. All of it needs npm, so all of it is `long`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from db.schema import migrate
from tests.conftest import database_address, execute
from tests.e2e.openclaw.stack import Stack, running_stack


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "openclaw":
            item.add_marker(pytest.mark.long)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(1800))  # the first one installs OpenClaw


@pytest.fixture(scope="session")
async def shared_stack(postgres_server: Any, temporal_address: str, tmp_path_factory: Any) -> AsyncIterator[Stack]:
    execute(postgres_server.url, "CREATE DATABASE openclaw")
    url = database_address(postgres_server.url, "openclaw")
    await asyncio.to_thread(migrate, url)
    async with running_stack(tmp_path_factory.mktemp("stack"), url, temporal_address) as running:
        yield running


@pytest.fixture
async def stack(shared_stack: Stack) -> Stack:
    """The sessions to be read are those that begin from now on."""
    await shared_stack.begin()
    return shared_stack
