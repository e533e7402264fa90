"""What an engine says that it loaded and runs is checked: what is not the version is unloaded, old figures renewed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from clawloop.core.adapters.directory import HASHED_FILES, adapter_sha256
from clawloop.core.contracts.training import VersionRef
from clawloop.core.errors import AdapterUnusable, EngineRejected, EngineUnavailable
from clawloop.serving.adapters import VllmControl
from clawloop.training.adapters.files import write_version
from tests.fakes.engine import serving

NAME = "default-v1"


class Loader:
    """Loads adapters as vLLM does, and something else if it is told to."""

    def __init__(self, while_loading: Callable[[str], str]) -> None:
        self.loaded: dict[str, str] = {}
        self.probes = 0
        self._while_loading = while_loading

    async def models(self, _: Request) -> JSONResponse:
        return JSONResponse(
            {"data": [{"id": name, "root": root, "parent": "tiny"} for name, root in self.loaded.items()]}
        )

    async def load(self, request: Request) -> JSONResponse:
        asked: dict[str, Any] = await request.json()
        self.loaded[asked["lora_name"]] = self._while_loading(asked["lora_path"])
        return JSONResponse({})

    async def unload(self, request: Request) -> JSONResponse:
        del self.loaded[(await request.json())["lora_name"]]
        return JSONResponse({})

    async def probe(self, _: Request) -> JSONResponse:
        self.probes += 1
        return JSONResponse({})

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
                Route("/v1/completions", self.probe, methods=["POST"]),
            ]
        )


class LoadedBefore(Loader):
    """Refuses a load as vLLM does after waiting for another one of the same name."""

    async def load(self, request: Request) -> JSONResponse:
        await super().load(request)
        return JSONResponse({"error": {"message": "has already been loaded"}}, 400)


def _changed(path: str) -> str:
    (Path(path) / HASHED_FILES[0]).write_bytes(b"other weights")
    return path


@pytest.mark.parametrize(
    ("while_loading", "error"),
    [
        (lambda path: path, None),
        (lambda _: "/elsewhere", EngineRejected),  # the name stands for another folder
        (_changed, AdapterUnusable),  # the files changed while they were read
    ],
)
async def test_what_was_loaded_is_the_version_or_is_unloaded_unused(
    tmp_path: Path, while_loading: Callable[[str], str], error: type[Exception] | None
) -> None:
    written = write_version(tmp_path / "default", 1, dict.fromkeys(HASHED_FILES, b"x"))
    path = str(written.path.relative_to(tmp_path))
    version = VersionRef(policy="default", n=1, parent=0, path=path, sha256=adapter_sha256(written.path))
    loader = Loader(while_loading)
    async with serving(loader.app) as url, VllmControl(url, tmp_path) as control:
        if error is None:
            await control.load(version, NAME)
        else:
            with pytest.raises(error):
                await control.load(version, NAME)
    assert loader.loaded == ({} if error else {NAME: str(written.path)})
    assert loader.probes == (0 if error else 1)


async def test_a_load_that_an_earlier_attempt_began_and_that_ends_first_is_no_refusal(tmp_path: Path) -> None:
    written = write_version(tmp_path / "default", 1, dict.fromkeys(HASHED_FILES, b"x"))
    path = str(written.path.relative_to(tmp_path))
    version = VersionRef(policy="default", n=1, parent=0, path=path, sha256=adapter_sha256(written.path))
    loader = LoadedBefore(lambda path: path)
    async with serving(loader.app) as url, VllmControl(url, tmp_path) as control:
        await control.load(version, NAME)
    assert loader.loaded == {NAME: str(written.path)}
    assert loader.probes == 1


@pytest.mark.parametrize("status", [401, 500, 503])
async def test_an_engine_that_cannot_answer_now_is_asked_again(tmp_path: Path, status: int) -> None:
    async def fails(_: Request) -> JSONResponse:
        return JSONResponse({"error": {"message": "its core ended"}}, status)

    paths = ("/v1/models", "/metrics", "/v1/unload_lora_adapter")
    routes = [Route(path, fails, methods=["GET", "POST"]) for path in paths]
    async with serving(Starlette(routes=routes)) as url, VllmControl(url, tmp_path) as control:
        for asked in (control.names(), control.running(), control.slots(), control.unload(NAME)):
            with pytest.raises(EngineUnavailable, match=str(status)):
                await asked


HOUR = 3600.0


@pytest.mark.parametrize("asked_since", [True, False])
async def test_after_the_clock_was_set_back_the_adapters_that_run_now_are_found(
    tmp_path: Path, asked_since: bool
) -> None:
    """vLLM keeps a series for each set of adapters that it ran; those from before the jump seem newest for an hour."""
    before = f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{NAME}",waiting_lora_adapters=""}}'
    now = before.replace(NAME, "default-v2")
    updated: list[float] = [time.time()] if asked_since else []

    async def metrics(_: Request) -> PlainTextResponse:
        lines = [f"{before} {time.time() + HOUR}", *(f"{now} {at}" for at in updated)]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "tiny", "root": "tiny", "parent": None}]})

    async def probe(_: Request) -> JSONResponse:
        updated.append(time.time())
        return JSONResponse({})

    routes = [
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/completions", probe, methods=["POST"]),
    ]
    async with serving(Starlette(routes=routes)) as url, VllmControl(url, tmp_path) as control:
        assert await control.running() == {"default-v2"}
        assert await control.slots() == 4
