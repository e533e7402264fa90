"""The image of the services is built, and runs as the Compose file says, on a PostgreSQL, a Temporal and a vLLM.

Needs a podman or docker that may use this machine's network (marked `containers`). `IMAGE_BUILD_OPTIONS` are further
options of its `build`, e.g. `--build-arg BASE=…` where no registry of images is in reach.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from benchmarks.processes import free_port, running, running_temporal, until, wait_for
from clawloop.app.local.services.postgres import running_postgres
from clawloop.app.local.tiny_model import ensure_tiny_model
from clawloop.sandboxes.containers import ContainerEngine
from tests.deploy.containers import Container, composed, of_compose
from tests.deploy.stated import ROOT
from tests.e2e.conftest import running_engine
from tests.engine_options import engine_options

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]
USER = 10001  # of the image


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    engine, name = ContainerEngine.find(), f"localhost/clawloop-services:{uuid4().hex}"
    command = [str(engine.program), "build", "--file", "deploy/Dockerfile", "--target", "services", "--tag", name]
    further = shlex.split(os.environ.get("IMAGE_BUILD_OPTIONS", ""))
    built = subprocess.run([*command, *further, "."], cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-4000:]
    yield name
    engine.ask("rmi", "--force", name)


@dataclass(frozen=True)
class Services:
    """Services of the Compose file in containers, on this machine's network."""

    program: str
    image: str
    described: Mapping[str, Container]
    environment: Mapping[str, str]
    folder: Path

    def command(self, name: str, words: Sequence[str] = (), further: Sequence[str] = ()) -> list[str]:
        """`run` with what compose gives the service, but for addresses.

        Args:
            words: in place of the service's own.
            further: arguments after them, which win.
        """
        data = self.folder / name
        data.mkdir(exist_ok=True)
        os.chown(data, USER, USER)
        given = {
            variable: value for variable, value in self.described[name].environment.items() if value is not None
        } | dict(self.environment)
        return [
            self.program, "run", "--rm", "--network", "host", "--read-only", "--cap-drop", "ALL",
            "--security-opt", "no-new-privileges", "--tmpfs", "/tmp", "--volume", f"{data}:/data",
            *(word for variable, value in given.items() for word in ("--env", f"{variable}={value}")),
            self.image, *(words or self.described[name].words), *further,
        ]  # fmt: skip

    def ask(self, name: str, *words: str, further: Sequence[str] = ()) -> str:
        done = subprocess.run(self.command(name, words, further), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


@pytest.fixture
def services(image: str, tmp_path: Path) -> Iterator[Callable[[], Services]]:
    with ExitStack() as stack:
        tmp_path.chmod(0o755)
        described = {each.name: each for each in of_compose(composed("cpu", tmp_path))}
        server = stack.enter_context(running_postgres(tmp_path / "postgres"))
        (tmp_path / "temporal").mkdir()
        temporal = stack.enter_context(running_temporal(tmp_path / "temporal"))
        environment = {"DATABASE_URL": server.url, "TEMPORAL_ADDRESS": temporal}
        yield lambda: Services(str(ContainerEngine.find().program), image, described, environment, tmp_path)


def test_a_chat_is_answered_recorded_and_judged(services: Callable[[], Services], tmp_path: Path) -> None:
    run, model = services(), ensure_tiny_model(tmp_path / "model")
    with ExitStack() as stack:
        options = engine_options(model, free_port())
        engine = stack.enter_context(running_engine(model, options, tmp_path / "vllm.log"))
        run.ask("migrate", "migrate", "--base-model", model.name, "--engine", engine)
        key = run.ask("admin", "key", "create").split()[-1]
        port = free_port()
        for name, further in {
            "gateway": ["--port", str(port), "--health-port", str(free_port())],
            "orchestrator": ["--health-port", str(free_port())],
            "judge": ["--health-port", str(free_port())],
            "engine-agent": ["--health-port", str(free_port()), "--engine", engine],
        }.items():
            command = run.command(name, further=further)
            process = stack.enter_context(running(command, tmp_path / f"{name}.log"))
            if name == "gateway":
                wait_for(f"http://127.0.0.1:{port}/healthz", process, tmp_path / "gateway.log")
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=300) as client:
            said: list[dict[str, str]] = []
            for text in ("Tell me a tale.", "Thanks, another one."):
                said.append({"role": "user", "content": text})
                body = {"model": "policy", "messages": said, "max_tokens": 8, "session_id": "s1"}
                answer = client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                said.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"] or ""})

        async def a_turn_is_judged() -> bool:
            return len(json.loads(run.ask("admin", "session", "list", "--judged", "--json"))["sessions"]) == 1

        asyncio.run(until(a_turn_is_judged, "a verdict on the first reply", seconds=300))
