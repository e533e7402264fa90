"""The `clawloop` program as people and process supervisors run it."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from clawloop.app.local import parts
from clawloop.app.local.parts import Deployment, JudgeEngine
from clawloop.core.errors import SetupError
from clawloop.core.settings import read_settings
from db.database import BACKGROUND_LIMIT, Database
from db.serving.engines import add_engine, list_engines
from tests.fakes.model_server import model_server
from tests.unit.layout.folders import write_folder
from tests.verbs import clawloop, clawloop_process, refusal


def test_migrate_with_a_base_model_prepares_a_deployment(empty_postgres_url: str, tmp_path: Path) -> None:
    here = {"DATABASE_URL": empty_postgres_url, "CLAWLOOP_DATA": str(tmp_path)}
    assert clawloop("migrate", **here).returncode == 0
    assert "clawloop migrate --base-model" in refusal(clawloop("key", "create", **here))

    migrate = ["migrate", "--base-model", "Qwen/Qwen3-4B", "--alias", "small", "--engine", "http://gpu:8100"]
    assert clawloop_process(*migrate, **here).returncode == 0
    assert clawloop_process("key", "create", **here).stdout.startswith("cl-")
    with psycopg.connect(empty_postgres_url) as connection:
        assert connection.execute("SELECT id, base_model, aliases FROM policies").fetchall() == [
            ("default", "Qwen/Qwen3-4B", ["small"])
        ]
        assert connection.execute("SELECT id FROM engines").fetchall() == [("gpu:8100",)]

    assert clawloop_process("engine", "remove", "gpu:8100", "--yes", **here).stdout == "gpu:8100 is removed.\n"
    assert "no engine 'gpu:8100'" in refusal(clawloop("engine", "remove", "gpu:8100", "--yes", **here))
    assert clawloop("migrate", "--alias", "small", **here).returncode == 2


def test_an_engine_of_another_model_is_refused_and_a_silent_one_added(empty_postgres_url: str, tmp_path: Path) -> None:
    here = {"DATABASE_URL": empty_postgres_url, "CLAWLOOP_DATA": str(tmp_path)}
    folder = write_folder(tmp_path / "Qwen3-4B")  # with 100 token ids
    with (
        model_server("Qwen3-4B", vocab=100) as same,
        model_server("Qwen3-4B", vocab=101) as larger,
        model_server("Qwen3-4B", vocab=99) as smaller,
        model_server("Llama") as other,
    ):
        migrate = ["migrate", "--base-model", "Qwen3-4B"]
        said = refusal(clawloop(*migrate, "--engine", other, **here))
        assert f"engine {other} serves Llama, the policies are of Qwen3-4B: give an engine of that model" in said
        done = clawloop(*migrate, "--engine", same, "--engine", "http://127.0.0.1:1", **here)
        assert (done.returncode, done.stderr) == (
            0,
            "engine http://127.0.0.1:1 does not answer yet; its model was not compared.\n",
        )
        for verb in (("engine", "add"), (*migrate, "--engine")):
            assert f"engine {other} serves Llama" in refusal(clawloop(*verb, other, **here))
            with_model = here | {"CLAWLOOP_MODEL": str(folder)}
            assert clawloop(*verb, same, **with_model).returncode == 0
            assert "with more token ids than the trainer's 100" in refusal(clawloop(*verb, larger, **with_model))
            assert "with fewer token ids than the trainer's 100" in refusal(clawloop(*verb, smaller, **with_model))
        assert f"{same} does not require authentication" in clawloop("engine", "add", same, **here).stderr
        refused = refusal(clawloop("engine", "add", same, "--require-guard", **here))
        assert "start it with the engine guard, or leave out --require-guard" in refused
        with psycopg.connect(empty_postgres_url) as connection:
            stored = connection.execute("SELECT url FROM engines ORDER BY url").fetchall()
    assert {url for (url,) in stored} == {same, "http://127.0.0.1:1"}


def test_a_drained_engine_stays_drained_when_a_deployment_migrates_again(
    empty_postgres_url: str, tmp_path: Path
) -> None:
    here = {"DATABASE_URL": empty_postgres_url, "CLAWLOOP_DATA": str(tmp_path)}
    migrate = ["migrate", "--base-model", "Qwen3-4B", "--engine", "http://127.0.0.1:1"]
    assert clawloop(*migrate, **here).returncode == 0
    assert clawloop("engine", "drain", "127.0.0.1:1", "--yes", **here).returncode == 0
    assert clawloop(*migrate, "--engine", "http://127.0.0.1:2", **here).returncode == 0
    with psycopg.connect(empty_postgres_url) as connection:
        stored = connection.execute("SELECT id, draining FROM engines ORDER BY id").fetchall()
    assert stored == [("127.0.0.1:1", True), ("127.0.0.1:2", False)]


def test_a_gateway_whose_port_is_in_use_reports_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refusal(
            clawloop_process(
                "gateway", "--port", str(port), "--data", str(tmp_path), DATABASE_URL="postgresql://me@127.0.0.1:1/x"
            )
        )
    assert f"port {port} for the gateway is in use" in line
    assert "--port" in line


def test_a_gateway_whose_data_folder_is_a_file_reports_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = clawloop(
        "gateway", "--port", "0", "--data", str(tmp_path / "file"), DATABASE_URL="postgresql://me@127.0.0.1:1/x"
    )
    assert f"cannot write to {tmp_path / 'file'}" in refusal(done)


def send_two_requests(port: int) -> None:
    """Send two requests over one connection, 6 s apart: clients keep an idle connection for 5 s (httpx)."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while True:
        try:
            connection.connect()
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    connection.auto_open = 0  # the second request must not open a new connection
    for pause in (6, 0):
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        time.sleep(pause)
    connection.close()


async def test_a_gateway_adds_configured_engines_and_keeps_connections_alive(postgres_url: str, tmp_path: Path) -> None:
    database = Database(postgres_url, BACKGROUND_LIMIT)
    await add_engine(database, "http://127.0.0.1:1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = {"DATABASE_URL": postgres_url, "CLAWLOOP_ENGINES": "http://127.0.0.1:2", "CLAWLOOP_DATA": str(tmp_path)}
    with (tmp_path / "log").open("w") as log:
        gateway = subprocess.Popen(
            [sys.executable, "-m", "clawloop.app.cli.main", "gateway", "--port", str(port)],
            env=dict(os.environ) | given,
            stdout=log,
            stderr=log,
        )
    try:
        async with asyncio.timeout(180):  # most of it is the start of the process
            while len(await list_engines(database)) < 2:
                assert gateway.poll() is None, (tmp_path / "log").read_text()
                await asyncio.sleep(0.1)
            await asyncio.to_thread(send_two_requests, port)
    finally:
        gateway.terminate()
        gateway.wait(60)
        await database.close()


def test_up_passes_allowed_hosts_to_the_gateway(tmp_path: Path) -> None:
    deployment = Deployment(
        tmp_path, "postgresql://x", "x:1", (), "tiny", (), {}, allowed_hosts=("clawloop.lan", "box")
    )
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        for gateway in parts.gateways(deployment, listener, 2, {}):
            assert gateway.prepare().command[-2:] == ("--allowed-host=clawloop.lan", "--allowed-host=box")


def test_up_gives_each_gateway_its_share_of_an_engine_and_a_persons_own_comes_first(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, "postgresql://x/y", "127.0.0.1:1", (), "tiny", (), {}, engine_chats=28)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        given = [
            parts.gateways(each, listener, 1, environment)[0].prepare().environment.get("CLAWLOOP_ENGINE_CHATS")
            for each, environment in (
                (deployment, {}),
                (deployment, {"CLAWLOOP_ENGINE_CHATS": "9"}),
                (replace(deployment, engine_chats=None), {}),
            )
        ]
    assert given == ["28", "9", None]


def test_up_gives_the_judge_worker_the_probes_that_an_engine_is_asked_at_once(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, "postgresql://x/y", "127.0.0.1:1", (), "tiny", (), {}, probes=4)

    def given(deployment: Deployment, environment: Mapping[str, str]) -> list[str | None]:
        return [
            part.prepare().environment.get("CLAWLOOP_PROBES_AT_ONCE") for part in parts.workers(deployment, environment)
        ]

    assert given(deployment, {}) == [None, "4"]
    assert given(deployment, {"CLAWLOOP_PROBES_AT_ONCE": "9"}) == ["9", "9"]
    assert given(replace(deployment, probes=None), {}) == [None, None]


def test_up_shares_the_grammars_that_an_engine_compiles_among_its_gateways(tmp_path: Path) -> None:
    name = "CLAWLOOP_CHAT_BOUNDS__STRUCTURED_REQUESTS_TOGETHER"
    deployment = Deployment(tmp_path, "postgresql://x/y", "127.0.0.1:1", (), "tiny", (), {}, grammars=2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        given = [
            parts.gateways(each, listener, 1, environment)[0].prepare().environment.get(name)
            for each, environment in (
                (deployment, {}),
                (deployment, {name: "9"}),
                (replace(deployment, grammars=None), {}),
            )
        ]
    assert given == ["2", "9", None]


def test_gateway_and_judge_worker_ask_the_judge_engine_that_is_started_here(tmp_path: Path) -> None:
    judge = JudgeEngine("http://127.0.0.1:9", "judge", secret="s3cret")
    deployment = Deployment(tmp_path, "postgresql://x/y", "127.0.0.1:1", (), "tiny", (), {}, judge=judge)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        [gateway] = parts.gateways(deployment, listener, 1, {})
        orchestrator, worker = parts.workers(deployment, {"CLAWLOOP_JUDGE_FORM": "free"})
        variables = [part.prepare().environment for part in (gateway, worker, orchestrator)]
    urls = [given.get("CLAWLOOP_JUDGE_URL") for given in variables]
    assert urls == ["http://127.0.0.1:9", "http://127.0.0.1:9", None]
    assert [given.get("CLAWLOOP_JUDGE_FORM") for given in variables] == ["auto", "free", "free"]
    assert [given.get("CLAWLOOP_JUDGE_API_KEY") for given in variables] == ["s3cret", "s3cret", None]


def test_every_verb_reports_a_shadowed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    done = clawloop_process("key", "list", DATABASE_URL="postgresql://me@127.0.0.1:1/x")
    assert f"{tmp_path}/db shadows" in refusal(done)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("CLAWLOOP_SESSION_IDLE_MINUTES", "soon", "input should be a valid number"),
        ("CLAWLOOP_SESSION_IDLE_MINUTES", "0", "input should be greater than 0"),
        ("CLAWLOOP_MAX_LORA_RANK", "7", "engines take one of 1, 8, 16"),
        ("CLAWLOOP_JUDGE_FORM", "secret", "input should be 'auto', 'free' or 'grammar'"),
    ],
)
def test_an_invalid_setting_is_one_line_with_its_name(
    name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SetupError) as raised:
        read_settings()
    message = str(raised.value)
    assert message.startswith(f"{name}: {expected}")
    assert message.endswith("; correct it or unset it")
    assert "\n" not in message
    assert "secret" not in message


def test_a_verb_reports_an_invalid_setting() -> None:
    line = refusal(clawloop_process("session", "list", CLAWLOOP_SESSION_IDLE_MINUTES="soon"))
    assert "CLAWLOOP_SESSION_IDLE_MINUTES" in line
