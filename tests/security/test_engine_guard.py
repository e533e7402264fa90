"""The guard of an engine refuses strangers, unused routes, and adapters from elsewhere."""

from __future__ import annotations

import ast
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from clawloop.app.local.keys_file import renew_engine_secret
from clawloop.app.local.model_layout import ModelOptions, model_in, plan_models
from clawloop.app.local.tiny_model import ensure_tiny_model
from clawloop.app.processes.endpoints import engine_secret
from clawloop.core.errors import SetupError
from clawloop.core.settings import Settings
from clawloop.serving import engine_guard
from clawloop.serving.engine_guard import EngineGuard
from clawloop.serving.engine_secret import SecretFile

SECRET = "s3cret"
USED = [
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/unload_lora_adapter"),
]
# vLLM 0.32 has them; most do not ask for its own key.
UNUSED = [
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/collective_rpc"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/sleep"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/start_profile"),
    ("GET", "/server_info"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/load_lora_adapter"),
    ("POST", "//v1/load_lora_adapter"),
    ("POST", "/v1/load_lora_adapter/"),
]


async def _echo(request: Request) -> JSONResponse:
    return JSONResponse({"path": request.url.path, "body": (await request.body()).decode()})


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "adapters"
    (folder / "default" / "v1").mkdir(parents=True)
    monkeypatch.setenv("CLAWLOOP_ENGINE_SECRET", SECRET)
    monkeypatch.setenv("CLAWLOOP_ENGINE_ADAPTERS", str(folder))
    monkeypatch.setenv("CLAWLOOP_ENGINE_HOSTS", "vllm, vllm.example.org")
    return folder


@pytest.fixture
def client(adapters: Path) -> httpx.AsyncClient:
    app = Starlette(routes=[Route("/{path:path}", _echo, methods=["GET", "POST"])])
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(EngineGuard(app)),
        base_url="http://127.0.0.1:8100",
        headers={"Authorization": f"Bearer {SECRET}"},
    )


@pytest.mark.parametrize(("method", "path"), USED)
async def test_what_clawloop_uses_passes_with_the_secret_alone(
    client: httpx.AsyncClient, method: str, path: str
) -> None:
    assert (await client.request(method, path, content=b"{}")).status_code == 200
    for header in ("", "Bearer", "Bearer wrong", f"Basic {SECRET}", SECRET, f"bearer  {SECRET}"):
        refused = await client.request(method, path, headers={"Authorization": header})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "engine_guard"), header


async def test_health_needs_no_secret(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health", headers={"Authorization": ""})).status_code == 200


@pytest.mark.parametrize(("method", "path"), UNUSED)
async def test_what_clawloop_does_not_use_is_refused_even_with_the_secret(
    client: httpx.AsyncClient, method: str, path: str
) -> None:
    assert (await client.request(method, path)).status_code == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8100", 200),
        ("[::1]:8100", 200),
        ("10.0.0.7", 200),
        ("VLLM:8000", 200),
        ("vllm.example.org", 200),
        ("evil.example", 421),
        ("vllm.example.org.evil.example", 421),
        ("", 421),
        ("[", 421),
    ],
)
async def test_other_host_names_are_refused(client: httpx.AsyncClient, host: str, status: int) -> None:
    for path in ("/health", "/v1/models"):
        assert (await client.get(path, headers={"Host": host})).status_code == status


async def test_an_adapter_is_loaded_from_the_folder_alone(client: httpx.AsyncClient, adapters: Path) -> None:
    async def load(path: str, **more: Any) -> int:
        body = {"lora_name": "default-v1", "lora_path": path} | more
        return (await client.post("/v1/load_lora_adapter", json=body)).status_code

    outside = adapters.parent / "outside"
    outside.mkdir()
    (adapters / "link").symlink_to(outside)
    assert await load(str(adapters / "default" / "v1")) == 200
    for path in (outside, adapters / "link", adapters / ".." / "outside", Path("/etc"), Path("default/v1"), Path("~")):
        assert await load(str(path)) == 403, path
    assert await load(f"{adapters}-other/v1") == 403
    assert await load(str(adapters / "default" / "v1"), load_inplace=True) == 403
    assert await load("/x\0") == 403


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"lora_name": "x"}', b'{"lora_name": "x", "lora_path": 7}', b" " * 100_000],
)
async def test_a_load_that_cannot_be_read_is_refused(client: httpx.AsyncClient, body: bytes) -> None:
    assert (await client.post("/v1/load_lora_adapter", content=body)).status_code == 400


async def test_the_body_of_a_load_arrives_whole(client: httpx.AsyncClient, adapters: Path) -> None:
    async def parts() -> Any:
        yield b'{"lora_name": "default-v1", '
        yield f'"lora_path": "{adapters / "default" / "v1"}"}}'.encode()

    echoed = await client.post("/v1/load_lora_adapter", content=parts())
    assert echoed.json()["body"] == f'{{"lora_name": "default-v1", "lora_path": "{adapters / "default" / "v1"}"}}'


async def test_without_a_folder_nothing_is_loaded(
    client: httpx.AsyncClient, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLAWLOOP_ENGINE_ADAPTERS")
    guard = EngineGuard(Starlette())
    transport = httpx.ASGITransport(guard)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=client.headers) as bare:
        body = {"lora_name": "x", "lora_path": str(adapters / "default" / "v1")}
        assert (await bare.post("/v1/load_lora_adapter", json=body)).status_code == 403


async def test_websockets_are_closed(adapters: Path) -> None:
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    await EngineGuard(Starlette())({"type": "websocket", "path": "/v1/realtime"}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_an_engine_without_a_secret_does_not_start(adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWLOOP_ENGINE_SECRET", "")
    with pytest.raises(RuntimeError, match="CLAWLOOP_ENGINE_SECRET"):
        EngineGuard(Starlette())


async def test_secrets_of_a_file_are_changed_while_the_engine_runs(
    adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secrets"
    file.write_text("old\n")
    file.chmod(0o600)
    monkeypatch.delenv("CLAWLOOP_ENGINE_SECRET")
    monkeypatch.setenv("CLAWLOOP_ENGINE_SECRET_FILE", str(file))
    transport = httpx.ASGITransport(EngineGuard(Starlette(routes=[Route("/v1/models", _echo)])))
    sent = SecretFile(file)

    async def accepted() -> list[str]:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            tried = {
                secret: await client.get("/v1/models", headers={"Authorization": f"Bearer {secret}"})
                for secret in ("old", sent() or "", "")
            }
        return sorted(secret for secret, answer in tried.items() if answer.status_code == 200)

    assert await accepted() == ["old"]
    assert renew_engine_secret(file, finish=False) == 2
    new = sent()
    assert new != "old"
    assert await accepted() == sorted(["old", str(new)])
    file.rename(tmp_path / "elsewhere")  # as while it is replaced
    assert await accepted() == sorted(["old", str(new)])
    (tmp_path / "elsewhere").rename(file)
    assert renew_engine_secret(file, finish=True) == 1
    assert await accepted() == [new]
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("mode", "refused"), [(0o644, True), (0o604, True), (0o640, False), (0o440, False)])
def test_secrets_that_everybody_may_read_are_refused(
    adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, refused: bool
) -> None:
    file = tmp_path / "secrets"
    file.write_text("old\n")
    file.chmod(mode)
    monkeypatch.delenv("CLAWLOOP_ENGINE_SECRET")
    monkeypatch.setenv("CLAWLOOP_ENGINE_SECRET_FILE", str(file))
    monkeypatch.setenv("CLAWLOOP_DATA", str(tmp_path))
    if not refused:
        EngineGuard(Starlette())
        assert engine_secret(Settings())() == "old"
        return
    with pytest.raises(RuntimeError, match="CLAWLOOP_ENGINE_SECRET_FILE: chmod 600"):
        EngineGuard(Starlette())
    with pytest.raises(SetupError, match=f"read the secrets of {file}: chmod 600 {file}"):
        engine_secret(Settings())
    with pytest.raises(SetupError, match=f"chmod 600 {file}"):
        renew_engine_secret(file, finish=False)


def test_a_file_of_secrets_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_bytes(b"\xff\xfe old\n")
    file.chmod(0o600)
    for read in (SecretFile, partial(renew_engine_secret, finish=False)):
        with pytest.raises(SetupError, match=f"cannot read {file}: it is no text in UTF-8"):
            read(file)
    missing = tmp_path / "missing"
    with pytest.raises(SetupError, match=f"cannot read {missing}: No such file"):
        SecretFile(missing)


async def test_a_change_that_shows_the_secrets_to_everybody_is_not_taken_up(
    adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "secrets"
    file.write_text("old\n")
    file.chmod(0o600)
    monkeypatch.delenv("CLAWLOOP_ENGINE_SECRET")
    monkeypatch.setenv("CLAWLOOP_ENGINE_SECRET_FILE", str(file))
    transport = httpx.ASGITransport(EngineGuard(Starlette(routes=[Route("/v1/models", _echo)])))
    sent = SecretFile(file)

    async def status(secret: str) -> int:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.get("/v1/models", headers={"Authorization": f"Bearer {secret}"})).status_code

    file.chmod(0o644)
    file.write_text("another\nold\n")
    assert (sent(), sent()) == ("old", "old")
    ours = [record.message for record in caplog.records if record.name.startswith("clawloop")]
    assert ours == ["secret of engines not changed"]  # said once
    assert (await status("another"), await status("old")) == (401, 200)
    file.chmod(0o600)
    assert sent() == "another"
    assert await status("another") == 200


def test_renewing_a_secret_changes_neither_owner_nor_permissions_nor_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "mounted" / "secret", tmp_path / "secret"
    real.parent.mkdir()
    real.write_text("old\n")
    real.chmod(0o640)
    owner = 10001 if os.getuid() == 0 else os.getuid()
    os.chown(real, owner, -1)
    link.symlink_to(real)
    with ThreadPoolExecutor() as several:  # none of them loses what another one put
        list(several.map(lambda _: renew_engine_secret(link, finish=False), range(8)))
    assert len(real.read_text().split()) == 9
    assert (link.is_symlink(), real.stat().st_uid, real.stat().st_mode & 0o777) == (True, owner, 0o640)
    assert [file.name for file in real.parent.iterdir()] == ["secret"]
    real.write_text("")
    with pytest.raises(SetupError, match="holds no secret"):
        renew_engine_secret(link, finish=True)


def test_a_stock_image_can_run_the_file_alone() -> None:
    """It imports nothing that Python itself does not bring."""
    tree = ast.parse(Path(engine_guard.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {str(name).split(".")[0] for name in imported} <= sys.stdlib_module_names


def test_up_refuses_secrets_that_everybody_may_read_before_it_starts_an_engine(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text("old\n")
    file.chmod(0o644)
    model = model_in(ensure_tiny_model(tmp_path))
    with pytest.raises(SetupError, match="CLAWLOOP_ENGINE_SECRET_FILE: everybody on this machine may read"):
        plan_models(model, ModelOptions(), None, {"CLAWLOOP_ENGINE_SECRET_FILE": str(file)}, 0, tmp_path)
