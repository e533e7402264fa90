"""Versions are published while eight clients stream: no request fails, no reply mixes versions, no stream stalls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psycopg
import pytest
import torch

from clawloop.core.contracts.training import VersionRef
from clawloop.core.contracts.turns import StoredTurn
from clawloop.serving.adapters import VllmControl
from db.schema import migrate
from tests.conftest import database_address, execute
from tests.e2e.adapters import apply_adapter, load_policy, logprobs, random_versions
from tests.e2e.gateway import RealGateway, prepared, running_gateway
from tests.e2e.publishing import chatting, gaps_with_and_without, publish_all, spread
from tests.e2e.workers import running_workers

PUBLISHES = 20
ORCHESTRATOR, AGENT = ["orchestrator"], ["engine", "--engine"]
CLIENTS = 8
# Above the largest gap in an equally long period of the same run without publishing.
GAP_SECONDS = 0.25
# A stall caused by publishing repeats in each round; one caused by another program does not.
ROUNDS = 3


@pytest.fixture
async def gateway(postgres_server: Any, engine_url: str, tmp_path: Path) -> AsyncIterator[RealGateway]:
    execute(postgres_server.url, "CREATE DATABASE publishing")
    url = database_address(postgres_server.url, "publishing")
    await asyncio.to_thread(migrate, url)
    async with running_gateway(url, await prepared(url, [engine_url]), tmp_path / "data") as running:
        yield running
    async with VllmControl(engine_url, tmp_path) as control:
        for name in await control.names():
            await control.unload(name)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1500)
async def test_twenty_publishes_while_eight_clients_stream(
    gateway: RealGateway, temporal_address: str, engine_url: str, tiny_model_path: Path, capsys: Any
) -> None:
    adapters = gateway.data / "adapters"
    versions = random_versions(tiny_model_path, adapters, range(1, ROUNDS * PUBLISHES + 1))
    within_bounds, published = False, 0
    url = gateway.database_url
    async with running_workers(gateway.data, url, temporal_address, ORCHESTRATOR, [*AGENT, engine_url]):
        await _wait_for_a_reply(gateway)
        async with chatting(gateway.url, gateway.key, CLIENTS) as seen:
            while not within_bounds and published < len(versions):
                batch = versions[published : published + PUBLISHES]
                publishes, during, quiet = await gaps_with_and_without(
                    seen, partial(publish_all, url, temporal_address, batch)
                )
                published += PUBLISHES
                with capsys.disabled():
                    print(f"\nfrom commit to active: {spread([publish.seconds for publish in publishes])}")  # noqa: T201
                    print(f"gaps without publishes: {spread(quiet)}; during: {spread(during)}")  # noqa: T201
                within_bounds = max(during) <= max(quiet) + GAP_SECONDS
            before = len(seen.answers)
            await _until(lambda: len(seen.answers) >= before + 2 * CLIENTS)
        turns = [await gateway.turn(answer) for answer in seen.answers]
        await _check_old_versions_are_unloaded(gateway, engine_url, published)
    assert seen.errors == []
    answered = Counter(turn.record.version for turn in turns)
    assert len(answered.keys() - {0}) >= PUBLISHES // 2
    assert max(answered) == published
    _check_each_reply_is_of_its_version(turns, tiny_model_path, adapters, versions)
    assert within_bounds


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.05)


async def _wait_for_a_reply(gateway: RealGateway) -> None:
    """Afterwards the gateway has cached the clients' key, so that a slow PostgreSQL does not matter."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
    async with gateway.client() as client, asyncio.timeout(60):
        while (await client.post("/v1/chat/completions", json=body)).status_code != 200:
            await asyncio.sleep(0.5)


def _check_each_reply_is_of_its_version(
    turns: list[StoredTurn], model: Path, adapters: Path, versions: list[VersionRef]
) -> None:
    policy = load_policy(model)
    directories: dict[int, Path | None] = {0: None} | {version.n: adapters / version.path for version in versions}
    distinguishable = 0
    for n in sorted({turn.record.version for turn in turns}):
        apply_adapter(policy, directories[n])
        for turn in turns:
            if turn.record.version == n:
                assert _worst_token(policy, turn) < 1e-3, f"an answer of version {n} is not of version {n} alone"
            elif turn.record.version == n + 1:
                distinguishable += _worst_token(policy, turn) > 0.1
    assert distinguishable > len(turns) // 2  # else the comparison shows nothing


def _worst_token(policy: Any, turn: StoredTurn) -> float:
    """The largest difference between a recorded log-prob and the model's own."""
    record = turn.record
    assert record.prompt_ids is not None
    assert record.response_ids is not None
    temperature = record.sampling["temperature"]
    assert isinstance(temperature, float)
    recomputed = logprobs(policy, record.prompt_ids, record.response_ids, temperature)
    return float((recomputed - torch.tensor(record.logprobs)).abs().max())


async def _check_old_versions_are_unloaded(gateway: RealGateway, engine_url: str, active: int) -> None:
    """Age the ledger by a minute, and wait until the engine has only the active version."""
    with psycopg.connect(gateway.database_url, autocommit=True) as connection:
        connection.execute("UPDATE versions SET retired_at = retired_at - interval '1 minute'")
        connection.execute("UPDATE engine_versions SET loaded_at = loaded_at - interval '1 minute'")
    async with VllmControl(engine_url, gateway.data / "adapters") as control, asyncio.timeout(30):
        while await control.names() != {f"default-v{active}"}:
            await asyncio.sleep(0.2)
    headers = {"Authorization": f"Bearer {gateway.key}"}
    async with aiohttp.ClientSession(gateway.url, headers=headers) as session:
        async with session.get("/v1/models", params={"versions": "true"}) as answer:
            listed = [model["id"] for model in (await answer.json())["data"]]
    assert {"default-v0", f"default-v{active}"} <= set(listed)
