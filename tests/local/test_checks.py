"""Checks before a start: every wrong machine or setting gives one line with a remedy."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from clawloop.app.local import checks
from clawloop.app.local.tiny_model import ensure_tiny_model
from clawloop.core.errors import SetupError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return ensure_tiny_model(tmp_path / "models")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def message(raised: pytest.ExceptionInfo[SetupError]) -> str:
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_a_port_in_use_is_reported_with_its_process_and_the_option(taken_port: int) -> None:
    with pytest.raises(SetupError) as raised:
        checks.choose_port("the gateway", "127.0.0.1", taken_port, "--port")
    text = message(raised)
    assert text.startswith(f"port {taken_port} for the gateway is in use by ")
    assert f"(process {os.getpid()})" in text
    assert text.endswith("choose another port with --port (0 takes a free one)")


def test_a_port_in_use_on_one_address_is_in_use_on_all(taken_port: int) -> None:
    with pytest.raises(SetupError, match="is in use"):
        checks.choose_port("the gateway", "0.0.0.0", taken_port, "--port")


def test_port_0_takes_a_free_one() -> None:
    port = checks.choose_port("vLLM", "127.0.0.1", 0, "--engine-port")
    assert checks.choose_port("vLLM", "127.0.0.1", port, "--engine-port") == port


@pytest.mark.parametrize("host", ["192.0.2.77", "no-such-host.invalid"])
def test_a_host_that_is_not_local_is_rejected(host: str) -> None:
    with pytest.raises(SetupError) as raised:
        checks.choose_port("the gateway", host, 30000, "--port")
    assert f"{host}:30000" in message(raised)


def rewrite_config(**changes: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def remove(*names: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return change


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (shutil.rmtree, "there is no model folder {0}: give the folder of a model in Hugging Face format"),
        (remove("config.json"), "{0} contains no model, config.json is missing: give the folder"),
        (lambda m: (m / "config.json").write_text("{"), "{0}/config.json does not describe a language model: give"),
        (lambda m: (m / "config.json").write_text("[]"), "{0}/config.json does not describe a language model: give"),
        (rewrite_config(architectures=[]), "{0}/config.json does not describe a language model: give"),
        (rewrite_config(hidden_size="x"), "{0}/config.json does not describe a language model: give"),
        (rewrite_config(architectures=["BertModel"]), "{0} is a BertModel, which writes no text: choose"),
        (remove("model.safetensors"), "{0} has no weights (*.safetensors): download the model again"),
        (remove("tokenizer.json"), "{0} has no tokenizer (tokenizer.json): download the model again"),
        (remove("chat_template.jinja"), "{0} has no chat template, so it cannot chat: choose"),
    ],
)
def test_a_model_that_cannot_be_served_is_rejected(model: Path, damage: Callable[[Path], None], expected: str) -> None:
    checks.require_model(model)
    damage(model)
    with pytest.raises(SetupError) as raised:
        checks.require_model(model)
    assert message(raised).startswith(expected.format(model))


def test_too_little_disk_is_reported_with_the_needed_amount(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(SetupError) as raised:
        checks.require_disk(tmp_path, needed_bytes=free * 2)
    assert message(raised).startswith(f"{free * 2 // 2**20} MiB of free disk are needed in {tmp_path}, ")
    checks.require_disk(tmp_path, needed_bytes=1)


def test_a_data_folder_is_locked_for_one_process(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with checks.lock_data_folder(data):
        program = (
            "import sys; from pathlib import Path; from clawloop.app.local.checks import lock_data_folder\n"
            f"with lock_data_folder(Path({str(data)!r})): pass"
        )
        other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert other.returncode == 1
        assert other.stderr.splitlines()[-1] == (
            f"clawloop.core.errors.SetupError: clawloop up already runs on {data} (process {os.getpid()}):"
            " stop it first, or choose another folder: --data"
        )
    with checks.lock_data_folder(data):
        pass


def test_a_data_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError) as raised, checks.lock_data_folder(tmp_path / "file" / "data"):
        pass
    assert message(raised).endswith("choose another folder: --data")


async def test_a_database_that_does_not_answer_is_reported() -> None:
    with pytest.raises(SetupError) as raised:
        await checks.require_database(f"postgresql+psycopg://me:secret@127.0.0.1:{unused_port()}/x")
    text = message(raised)
    assert text.startswith("DATABASE_URL: connection failed")
    assert text.endswith("start that PostgreSQL or correct the URL; unset it to start one here")
    assert "secret" not in text


@pytest.mark.parametrize(
    "url",
    [
        "mysql://me:secret@127.0.0.1/x",
        "me:secret@127.0.0.1/x",
        "postgresql://me:secret@127.0.0.1:port/x",
        "postgresql://me:top@secret@127.0.0.1/x",
        "postgresql://me:secret@127.0.0.1/x?nonsense=1",
    ],
)
async def test_an_invalid_database_url_is_reported_without_its_password(url: str) -> None:
    with pytest.raises(SetupError, match="DATABASE_URL") as raised:
        await checks.require_database(url)
    assert "secret" not in "".join(traceback.format_exception(raised.value))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "nonsense", ""])
async def test_a_temporal_that_does_not_answer_is_reported(address: str) -> None:
    with pytest.raises(SetupError) as raised:
        await checks.require_temporal(address.format(port=unused_port()))
    assert message(raised).startswith("TEMPORAL_ADDRESS: no Temporal with a namespace `default` answers at ")


Answer = Callable[[], web.Response]
Serve = Callable[[Answer], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server that answers `/v1/models` with the given response; returns its URL."""
    runners: list[web.AppRunner] = []

    async def start(answer: Answer) -> str:
        async def handler(request: web.Request) -> web.Response:
            return answer()

        app = web.Application()
        app.router.add_get("/v1/models", handler)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        port = unused_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{port}"

    yield start
    for runner in runners:
        await runner.cleanup()


def models(*names: str, adapter_of: str | None = None) -> Answer:
    bases = [{"id": name, "parent": None} for name in names]
    return lambda: web.json_response(
        {"data": [{"id": "default-v3", "parent": adapter_of}, *bases] if adapter_of else bases}
    )


async def test_an_engine_names_its_base_model_not_its_adapters(serve: Serve) -> None:
    assert await checks.require_engine(await serve(models("qwen3-4b", adapter_of="qwen3-4b"))) == "qwen3-4b"


async def test_an_engine_that_does_not_answer_is_reported() -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(SetupError) as raised:
        await checks.require_engine(url)
    text = message(raised)
    assert text.startswith(f"engine {url}: Cannot connect to host")
    assert text.endswith("start it or correct CLAWLOOP_ENGINES; unset it to start one here")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda: web.Response(text="hello"), "does not answer like vLLM"),
        (lambda: web.json_response([1]), "does not answer like vLLM"),
        (lambda: web.json_response({"data": ["x"]}), "does not answer like vLLM"),
        (lambda: web.Response(status=503), "503"),
        (models(), "serves no model"),
    ],
)
async def test_a_server_that_is_not_vllm_is_rejected(serve: Serve, answer: Answer, expected: str) -> None:
    url = await serve(answer)
    with pytest.raises(SetupError) as raised:
        await checks.require_engine(url)
    assert message(raised).startswith(f"engine {url}")
    assert expected in message(raised)


@pytest.mark.parametrize("url", ["not a url", "127.0.0.1:8100", "ftp://x"])
async def test_an_invalid_engine_url_is_reported(url: str) -> None:
    with pytest.raises(SetupError, match="engine "):
        await checks.require_engine(url)


async def test_engines_must_serve_the_same_model(serve: Serve) -> None:
    one, other = await serve(models("a")), await serve(models("b"))
    assert await checks.require_engines((one, one)) == "a"
    with pytest.raises(SetupError) as raised:
        await checks.require_engines((one, other))
    assert message(raised) == (
        f"CLAWLOOP_ENGINES serve different models ({one} a, {other} b): give engines of one model"
    )
