"""Twenty people on one engine that has a slot for four adapters, and memory for eight."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from clawloop.serving.adapters import VllmControl
from db.schema import migrate
from tests.conftest import database_address, execute
from tests.e2e.adapters import apply_adapter, load_policy, logprobs
from tests.e2e.gateway import RealGateway, prepared, running_gateway
from tests.e2e.many_policies import Person, add_people

PEOPLE = 20
ROUNDS = 3


@pytest.fixture
async def gateway(postgres_server: Any, engine_url: str, tmp_path: Path) -> AsyncIterator[RealGateway]:
    execute(postgres_server.url, "CREATE DATABASE people")
    url = database_address(postgres_server.url, "people")
    await asyncio.to_thread(migrate, url)
    async with running_gateway(url, await prepared(url, [engine_url]), tmp_path / "data") as running:
        yield running
    async with VllmControl(engine_url, tmp_path) as control:
        for name in await control.names():
            await control.unload(name)


@pytest.mark.slow
async def test_all_answer_at_once_each_with_its_own_adapter(
    gateway: RealGateway, engine_url: str, tiny_model_path: Path
) -> None:
    adapters = gateway.data / "adapters"
    people = await add_people(gateway.database_url, engine_url, tiny_model_path, adapters, PEOPLE)
    async with VllmControl(engine_url, adapters) as control:
        assert await control.slots() < PEOPLE
    answers: list[tuple[Person, httpx.Response]] = []

    async def chat(person: Person) -> None:
        headers = {"Authorization": f"Bearer {person.key}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=240) as client:
            for n in range(ROUNDS):
                body = {"model": "policy", "messages": [{"role": "user", "content": f"Tale {n}."}], "max_tokens": 8}
                answers.append((person, await client.post("/v1/chat/completions", json=body)))

    await asyncio.gather(*(chat(person) for person in people))
    assert Counter(answer.status_code for _, answer in answers) == {200: PEOPLE * ROUNDS}
    policy = load_policy(tiny_model_path)
    for person, answer in answers[-PEOPLE:]:
        record = (await gateway.turn(answer.json()["id"])).record
        assert (record.policy, record.version) == (person.version.policy, 1)
        assert record.prompt_ids
        assert record.response_ids
        temperature = record.sampling["temperature"]
        assert isinstance(temperature, float)
        recorded = torch.tensor(record.logprobs)
        distances = {}
        for own in (person, next(other for other in people if other is not person)):
            apply_adapter(policy, adapters / own.version.path)
            recomputed = logprobs(policy, record.prompt_ids, record.response_ids, temperature)
            distances[own is person] = float((recomputed - recorded).abs().max())
        assert distances[True] < 1e-3 < distances[False], person.version
