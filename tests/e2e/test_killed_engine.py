"""An engine killed during a load is restarted by its agent's command, gets its versions again, and answers."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import psycopg
import pytest

from clawloop.app.local.checks import choose_port
from clawloop.app.local.services.vllm import launch, read_model
from db.schema import migrate
from tests.conftest import database_address, execute
from tests.e2e.adapters import random_versions
from tests.e2e.gateway import RealGateway, prepared, running_gateway
from tests.e2e.publishing import commit
from tests.e2e.workers import running_workers
from tests.engine_options import engine_options

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]

START_SECONDS = 900


def start_command(model: Path, port: int, folder: Path) -> str:
    """Shell command that starts the engine in a new session and exits; writes `engine.pid`."""
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    started = launch(read_model(model), engine_options(model, port), environment)
    (folder / "engine.json").write_text(json.dumps([list(started.command), dict(started.environment)]))
    program = (
        "import json, pathlib, subprocess, sys; folder = pathlib.Path(sys.argv[1]);"
        "command, environment = json.loads((folder / 'engine.json').read_text());"
        "log = (folder / 'vllm.log').open('ab');"
        "started = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,"
        " start_new_session=True);"
        "(folder / 'engine.pid').write_text(str(started.pid))"
    )
    return shlex.join([sys.executable, "-c", program, str(folder)])


def kill_engine(folder: Path) -> None:
    engine = psutil.Process(int((folder / "engine.pid").read_text()))
    for process in [engine, *engine.children(recursive=True)]:
        process.send_signal(signal.SIGKILL)


@pytest.mark.timeout(5400)
async def test_an_engine_killed_during_a_load_is_restarted_with_its_versions(
    postgres_server: Any, temporal_address: str, tiny_model_path: Path, tmp_path: Path
) -> None:
    execute(postgres_server.url, "CREATE DATABASE killed")
    url = database_address(postgres_server.url, "killed")
    await asyncio.to_thread(migrate, url)
    port = choose_port("vLLM", "127.0.0.1", 0, "")
    engine = f"http://127.0.0.1:{port}"
    keys = await prepared(url, [engine])
    versions = random_versions(tiny_model_path, tmp_path / "adapters", [1, 2])
    # The agent's restart command also starts the engine the first time.
    agent = ["engine", "--engine", engine, "--restart-command", start_command(tiny_model_path, port, tmp_path)]
    try:
        async with running_workers(tmp_path, url, temporal_address, ["orchestrator"], agent):
            await commit(url, versions[0])
            await until_loaded(url, 1)
            async with running_gateway(url, keys, tmp_path, TEMPORAL_ADDRESS=temporal_address) as gateway:
                execute(url, "UPDATE policies SET active = 1")
                await answered_by(gateway, 1)
                await commit(url, versions[1])
                # The kill may hit the load or come before it; the outcome must be the same.
                loading = asyncio.create_task(load_directly(engine, tmp_path / "adapters" / versions[1].path))
                kill_engine(tmp_path)
                await asyncio.gather(loading, return_exceptions=True)
                waiting = asyncio.create_task(answered_by(gateway, 1))
                await until_loaded(url, 1, 2)
                await waiting
    finally:
        kill_engine(tmp_path)


async def load_directly(engine: str, path: Path) -> None:
    async with aiohttp.ClientSession(engine) as session:
        await session.post("/v1/load_lora_adapter", json={"lora_name": "default-v2", "lora_path": str(path)})


async def until_loaded(url: str, *numbers: int) -> None:
    """Wait until the ledger lists exactly these versions as loaded, and no problem of the engine."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
                rows = await (await connection.execute("SELECT version FROM engine_versions ORDER BY 1")).fetchall()
                problem = await (await connection.execute("SELECT problem FROM engines")).fetchone()
            if [n for (n,) in rows] == list(numbers) and problem == (None,):
                return
            await asyncio.sleep(0.2)


async def answered_by(gateway: RealGateway, version: int) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 8}
    async with gateway.client(timeout=START_SECONDS) as client, asyncio.timeout(2 * START_SECONDS):
        # On a busy machine the start may take longer than a request is held; then the client gets 503 and retries.
        while (answer := await client.post("/v1/chat/completions", json=body)).status_code == 503:
            await asyncio.sleep(1)
    assert answer.status_code == 200, answer.text
    assert (await gateway.turn(answer.json()["id"])).record.version == version
