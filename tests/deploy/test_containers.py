"""Commands, flags, variables, mounts and probes of the containers in compose and Kubernetes match the programs."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import typer
from pydantic import AliasChoices
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from typer.main import get_command

from clawloop.app.cli.main import app
from clawloop.app.layout import plan as layouts
from clawloop.app.layout.memory import Process, Role, chats_of_gateway, grammars_of_gateway, probes_at_once
from clawloop.app.local.services.vllm import GUARD_SECRET, GUARD_SECRETS, EngineOptions, ModelFacts, launch
from clawloop.app.local.supervision.supervisor import Launch
from clawloop.core.families.chat_format import ChatFormat
from clawloop.core.families.template import Thinking
from clawloop.core.settings import Settings
from clawloop.serving.engine_guard import EngineGuard
from tests.deploy.containers import Container, composed, kustomized, of_compose, of_kubernetes
from tests.deploy.stated import ROOT
from tests.unit.layout import shapes

# The model of the examples.
CHAT = ChatFormat(Thinking.OPTIONAL, "hermes", "qwen3")
QWEN3_4B = ModelFacts(path=Path("/models/Qwen3-4B"), name="Qwen3-4B", chat=CHAT)
SHAPE = replace(shapes.QWEN3_4B, chat=CHAT)
# GiB of the GPUs of the machines that the examples are for; None: no GPU.
MACHINES: dict[str, tuple[int, ...] | None] = {
    "compose cpu": None,
    "compose cuda": (80,),
    "kubernetes cpu": None,
    "kubernetes cuda": (80, 80),
}
MEMORY = 192
"""GiB: a CPU engine's cache holds two contexts; the examples take no more of a machine that they do not know."""
# In both; `test_compose` and `test_kubernetes` have the number.
GATEWAYS = 2
TRAINERS_OWN = {"PYTORCH_ALLOC_CONF", "MALLOC_MMAP_THRESHOLD_", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
REFERENCED = {"MODEL_NAME", "POD_NAME", "CLAWLOOP_MODEL", "TOOL_CHOICE", "TOOL_PARSER", "REASONING_PARSER"} | {
    "MAX_LORAS",
    "MAX_CPU_LORAS",
}
JOBS = {"migrate", "admin", "temporal-schema", "temporal-namespace"}
OTHERS = {"temporal", "postgres", "temporal-postgres", "temporal-ui"}


@pytest.fixture(scope="module", params=["compose cpu", "compose cuda", "kubernetes cpu", "kubernetes cuda"])
def described(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Container]]:
    """What describes containers, for a device, and all of them."""
    kind, device = request.param.split()
    if kind == "compose":
        return request.param, of_compose(composed(device, tmp_path_factory.mktemp("compose")))
    return request.param, of_kubernetes(kustomized(device))


@pytest.fixture
def device(described: tuple[str, list[Container]]) -> str:
    return described[0].split()[1]


@pytest.fixture
def planned(described: tuple[str, list[Container]]) -> dict[Role, Process]:
    """The engine and the trainer as `clawloop plan` lays them out on the example's machine."""
    layout = layouts.plan(shapes.request(SHAPE, MACHINES[described[0]], memory=MEMORY))
    return {process.role: process for process in layout.processes}


@pytest.fixture
def containers(described: tuple[str, list[Container]]) -> list[Container]:
    return described[1]


def ours(containers: Iterable[Container]) -> list[Container]:
    """Those that run `clawloop`, with a verb."""
    return [container for container in containers if container.is_ours and not container.entrypoint and container.words]


def the(containers: Iterable[Container], *words: str) -> Container:
    """The one that runs this verb."""
    [found] = [container for container in ours(containers) if container.words[: len(words)] == words]
    return found


def engine_of(containers: Iterable[Container]) -> Container:
    [found] = [container for container in containers if container.is_engine]
    return found


def flags(words: Iterable[str]) -> dict[str, list[str]]:
    """Each flag with its values."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            values = found.setdefault(name, [])
            word = value
            if not equals:
                continue
        values.append(word)
    return found


def as_of_up(engine: Container, arguments: tuple[str, ...]) -> Launch:
    """An engine of `clawloop up`, guarded by the container's secret."""
    guard = {name: value or "" for name, value in engine.environment.items() if name in (GUARD_SECRET, GUARD_SECRETS)}
    assert len(guard) == 1
    return launch(QWEN3_4B, EngineOptions(8100, arguments, guard), {})


def test_every_process_has_a_container(containers: list[Container]) -> None:
    for verb in ("gateway", "migrate"):
        the(containers, verb)
    for role in ("orchestrator", "judge", "engine", "trainer"):
        the(containers, "worker", role)
    engine_of(containers)


def test_every_command_line_parses(containers: list[Container]) -> None:
    for container in ours(containers):
        command = get_command(app)
        words = list(container.words)
        while isinstance(command, typer.core.TyperGroup):
            command = command.commands[words.pop(0)]
        command.make_context(container.name, words)  # raises a usage error


def test_gateways_leave_sequences_of_the_engine_for_the_judge(
    described: tuple[str, list[Container]], containers: list[Container]
) -> None:
    share = chats_of_gateway(int(engine_of(containers).option("--max-num-seqs")), GATEWAYS)
    assert the(containers, "gateway").environment["CLAWLOOP_ENGINE_CHATS"] == str(share)
    probes = probes_at_once(int(engine_of(containers).option("--max-num-seqs")))
    judges = 2 if described[0].startswith("kubernetes") else 1  # `test_kubernetes` has the number
    assert the(containers, "worker", "judge").environment["CLAWLOOP_PROBES_AT_ONCE"] == str(probes // judges)
    # On the engine's smallest machine.
    grammars = the(containers, "gateway").environment["CLAWLOOP_CHAT_BOUNDS__STRUCTURED_REQUESTS_TOGETHER"]
    assert grammars == str(grammars_of_gateway(1, GATEWAYS))


def test_every_variable_is_a_setting(containers: list[Container]) -> None:
    settings = set()
    for name, field in Settings.model_fields.items():
        alias = field.validation_alias
        settings.add(str(alias.choices[0]) if isinstance(alias, AliasChoices) else f"CLAWLOOP_{name.upper()}")
    unknown = {
        name
        for container in containers
        if container.is_ours and not container.is_engine
        for name in container.environment
        if name.partition("__")[0] not in settings | REFERENCED | TRAINERS_OWN
    }
    assert unknown == set()
    # Arguments may refer to these.
    referenced = {name for container in containers for name in container.referenced}
    assert referenced <= REFERENCED


def test_every_process_gets_the_addresses_of_postgresql_and_temporal(containers: list[Container]) -> None:
    for container in ours(containers):
        database = container.environment["DATABASE_URL"]
        assert database is not None
        assert database.startswith("postgresql://clawloop:")
        assert container.environment["TEMPORAL_ADDRESS"]


def test_vllm_has_the_flags_of_clawloop_up(containers: list[Container], planned: dict[Role, Process]) -> None:
    engine = engine_of(containers)
    started = as_of_up(engine, planned[Role.ENGINE].arguments)
    assert flags(engine.words) == {**flags(started.command), "--host": ["0.0.0.0"]}
    assert started.environment.items() <= engine.environment.items()


async def test_the_engine_answers_to_gateways_judges_and_its_agent_alone(
    containers: list[Container], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its guard with its container's environment, where they look for it."""
    engine, agent = engine_of(containers), the(containers, "worker", "engine")
    secrets = tmp_path / "secrets"
    secrets.write_text("secret3\n")
    secrets.chmod(0o440)  # as Kubernetes mounts it
    environment = dict(engine.environment)
    for asks in (the(containers, "gateway"), the(containers, "worker", "judge"), agent):
        for name in (GUARD_SECRET, GUARD_SECRETS):
            assert asks.environment.get(name) == environment.get(name)
    if mounted := environment.get(GUARD_SECRETS):
        for container in (engine, agent, the(containers, "gateway"), the(containers, "worker", "judge")):
            assert container.writable[mounted.rpartition("/")[0]] is False
        environment[GUARD_SECRETS] = str(secrets)
    for name in (GUARD_SECRET, GUARD_SECRETS, "CLAWLOOP_ENGINE_ADAPTERS", "CLAWLOOP_ENGINE_HOSTS"):
        monkeypatch.delenv(name, raising=False)
        if value := environment.get(name):
            monkeypatch.setenv(name, value.replace("$(POD_NAME)", "engine-0"))

    async def models(_: Request) -> PlainTextResponse:
        return PlainTextResponse("models")

    routes = [Route("/v1/models", models), Route("/v1/load_lora_adapter", models, methods=["POST"])]
    guard = httpx.ASGITransport(EngineGuard(Starlette(routes=routes)))
    address = agent.option("--engine").replace("$(POD_NAME)", "engine-0")
    for url, secret, status in (
        (address, "secret3", 200),
        (address, "another", 401),
        ("http://rebound.example:8100", "secret3", 421),
    ):
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(transport=guard, base_url=url, headers=headers) as client:
            assert (await client.get("/v1/models")).status_code == status
            load = {"lora_name": "a", "lora_path": "/data/adapters/default/1"}
            assert (await client.post("/v1/load_lora_adapter", json=load)).status_code == status


def test_the_trainer_has_the_limits_of_clawloop_up(containers: list[Container], planned: dict[Role, Process]) -> None:
    trainer, layout = the(containers, "worker", "trainer"), planned[Role.TRAINER]
    given = flags(trainer.words)
    expected = flags(layout.arguments)
    expected.pop("--recompute-beyond", None)  # these files do not know how much memory a machine has left
    for default in ("--dtype", "--nproc"):  # Kubernetes leaves them out
        assert given.pop(default, expected[default]) == expected.pop(default)
    assert expected.items() <= given.items()
    visible = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}  # containers see their own GPUs alone
    assert {name: trainer.environment.get(name) for name in layout.environment if name not in visible} == {
        name: value for name, value in layout.environment.items() if name not in visible
    }


def test_trainer_and_engine_have_the_same_model(containers: list[Container], device: str) -> None:
    trainer, engine = the(containers, "worker", "trainer"), engine_of(containers)
    model = engine.option("--model")
    assert trainer.environment["CLAWLOOP_MODEL"] == model
    assert engine.option("--served-model-name") == model.rpartition("/")[2]
    # Without it the trainer uses the folder's name, after resolving links.
    assert trainer.option("--base-model") == engine.option("--served-model-name")
    assert the(containers, "migrate").option("--base-model") == engine.option("--served-model-name")
    assert trainer.option("--device") == device
    for container in (trainer, engine):
        assert [writable for path, writable in container.writable.items() if model.startswith(path)] == [False]


def test_gateways_and_the_agent_use_the_same_engine_address(containers: list[Container]) -> None:
    agent, engine = the(containers, "worker", "engine"), engine_of(containers)
    address = agent.option("--engine")
    assert the(containers, "migrate").option("--engine") == address
    assert address.rpartition(":")[2] == engine.option("--port")


def test_adapters_have_the_same_path_everywhere(containers: list[Container]) -> None:
    writable = {container.name: container.writable.get("/data/adapters") for container in containers}
    users = {name: write for name, write in writable.items() if write is not None and name != "admin"}
    agent, engine = the(containers, "worker", "engine").name, engine_of(containers).name
    assert users == {"trainer": True, "orchestrator": True, agent: False, engine: False}
    assert {container.environment["CLAWLOOP_DATA"] for container in ours(containers)} == {"/data"}
    assert the(containers, "gateway").writable["/data"]


def test_probes_use_real_ports_and_routes(containers: list[Container]) -> None:
    probed = {container.name: set(container.probes) for container in containers if container.probes}
    assert set(probed) == {container.name for container in containers} - JOBS - OTHERS
    for container in containers:
        if container.is_engine:
            assert probed[container.name] == {(8100, "/health")}
        elif container.words[:1] == ("gateway",):
            # Not /readyz: it fails without PostgreSQL or an engine, and a gateway serves without either.
            assert probed[container.name] == {(30000, "/healthz")}
        elif container.words[:1] == ("worker",):
            port = int(container.option("--health-port"))
            assert probed[container.name] <= {(port, "/healthz"), (port, "/readyz")}
            assert (port, "/readyz") in probed[container.name]


def test_image_tags_are_versions(containers: list[Container], device: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for container in containers:
        name, _, tag = container.image.rpartition(":")
        assert tag
        assert tag != "latest"
        if container.is_ours:
            models = container.is_engine or container.name == "trainer"
            expected = ("clawloop-models", f"{version}-{device}") if models else ("clawloop-services", version)
            assert (name, tag) == expected
