"""Contract of `EngineControl`, for the fake and for a real vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest

from clawloop.app.local.checks import choose_port
from clawloop.core.adapters.directory import CONFIG_FILE, adapter_sha256
from clawloop.core.contracts.training import VersionRef
from clawloop.core.errors import AdapterUnusable, EngineRejected, EngineUnavailable
from clawloop.serving.adapters import VllmControl
from clawloop.training.model.port import LoraShape
from tests.e2e.adapters import random_versions
from tests.fakes.engine_control import FakeEngineControl

Control = FakeEngineControl | VllmControl


@dataclass
class Bench:
    """
    Attributes:
        busy: context in which an adapter has a running request.
        dead: control of an engine that does not run.
    """

    control: Control
    dead: Control
    adapters: Path
    versions: list[VersionRef]
    busy: Callable[[str], AbstractAsyncContextManager[None]]


@pytest.fixture(scope="module")
def versions(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[VersionRef]]:
    adapters = tmp_path_factory.mktemp("data") / "adapters"
    return adapters, random_versions(tiny_model_path, adapters, [901, 902])


@pytest.fixture
async def fake_bench(versions: tuple[Path, list[VersionRef]]) -> Bench:
    adapters, written = versions
    control, dead = FakeEngineControl(adapters), FakeEngineControl(adapters)
    dead.alive = False

    @asynccontextmanager
    async def busy(name: str) -> AsyncIterator[None]:
        control.busy.add(name)
        yield
        control.busy.remove(name)

    return Bench(control, dead, adapters, written, busy)


@pytest.fixture
async def vllm_bench(versions: tuple[Path, list[VersionRef]], engine_url: str) -> AsyncIterator[Bench]:
    adapters, written = versions
    nowhere = f"http://127.0.0.1:{choose_port('no engine', '127.0.0.1', 0, '')}"

    @asynccontextmanager
    async def busy(name: str) -> AsyncIterator[None]:
        body = {"model": name, "prompt": [1], "max_tokens": 3000, "ignore_eos": True, "stream": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{engine_url}/v1/completions", json=body) as response,
        ):
            await response.content.readline()
            yield

    async with VllmControl(engine_url, adapters) as control, VllmControl(nowhere, adapters) as dead:
        yield Bench(control, dead, adapters, written, busy)
        for name in await control.names():
            await control.unload(name)


@pytest.fixture(params=["fake", pytest.param("vllm", marks=pytest.mark.engine)])
def bench(request: pytest.FixtureRequest) -> Bench:
    chosen: Bench = request.getfixturevalue(f"{request.param}_bench")
    return chosen


async def test_loading_and_unloading_are_idempotent(bench: Bench) -> None:
    one, two = bench.versions
    await bench.control.load(one, "default-v901")
    await bench.control.load(two, "default-v902")
    await bench.control.load(one, "default-v901")
    assert await bench.control.names() == {"default-v901", "default-v902"}
    for _ in range(2):
        await bench.control.unload("default-v901")
    assert await bench.control.names() == {"default-v902"}


async def test_a_directory_that_does_not_match_the_ledger_is_not_loaded(bench: Bench) -> None:
    with pytest.raises(AdapterUnusable, match="expected 000000000000"):
        await bench.control.load(replace(bench.versions[0], sha256="0" * 64), "default-v903")
    with pytest.raises(AdapterUnusable, match="cannot be read"):
        await bench.control.load(replace(bench.versions[0], path="default/v903-nowhere"), "default-v903")
    assert "default-v903" not in await bench.control.names()


@pytest.mark.engine
async def test_an_adapter_of_a_higher_rank_is_rejected_with_the_flag_to_raise(
    vllm_bench: Bench, tiny_model_path: Path
) -> None:
    [wide] = random_versions(tiny_model_path, vllm_bench.adapters, [905], LoraShape(rank=32, alpha=32.0))
    with pytest.raises(EngineRejected) as rejected:
        await vllm_bench.control.load(wide, "default-v905")
    message = str(rejected.value.error["message"])
    assert "LoRA rank 32 is greater than max_lora_rank 16" in message
    assert (
        ". Start the engine with a larger --max-lora-rank, or set a recipe with a smaller train.lora.rank." in message
    )


async def test_an_adapter_the_engine_cannot_read_is_rejected_with_its_reason(bench: Bench, tmp_path: Path) -> None:
    good = bench.adapters / bench.versions[0].path
    bad = good.with_name("v904-bad")
    bad.mkdir(exist_ok=True)
    for file in good.iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    (bad / CONFIG_FILE).write_text("{}")
    version = VersionRef("default", 904, 0, "default/v904-bad", adapter_sha256(bad))
    with pytest.raises(EngineRejected) as raised:
        await bench.control.load(version, "default-v904")
    assert "Missing required configuration fields" in str(raised.value.error["message"])
    assert "default-v904" not in await bench.control.names()
    assert await bench.control.healthy()


async def test_adapters_with_running_requests_are_listed(bench: Bench) -> None:
    one, two = bench.versions
    await bench.control.load(one, "default-v901")
    await bench.control.load(two, "default-v902")
    assert await bench.control.running() == frozenset()
    async with bench.busy("default-v901"):
        async with asyncio.timeout(60):
            while await bench.control.running() != {"default-v901"}:
                await asyncio.sleep(0.05)
    async with asyncio.timeout(60):
        while await bench.control.running():
            await asyncio.sleep(0.05)
    assert await bench.control.slots() == 4


async def test_a_dead_engine_is_unavailable(bench: Bench) -> None:
    assert await bench.control.healthy()
    assert not await bench.dead.healthy()
    for call in (bench.dead.names, bench.dead.running, bench.dead.slots):
        with pytest.raises(EngineUnavailable, match="cannot be reached"):
            await call()
    with pytest.raises(EngineUnavailable):
        await bench.dead.load(bench.versions[0], "default-v901")
    with pytest.raises(EngineUnavailable):
        await bench.dead.unload("default-v901")
