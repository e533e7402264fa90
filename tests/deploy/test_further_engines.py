"""What may be added to compose and Kubernetes: a judge engine, a quantised copy, parsers of another family."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from clawloop.app.layout import plan as layouts
from clawloop.app.layout.memory import Process, Role
from clawloop.app.layout.request import TrainingNeeds, limits_for
from clawloop.app.local.services.vllm import EngineOptions, launch
from tests.deploy.containers import (
    DEPLOY,
    Container,
    built,
    compose,
    composed,
    filled_in,
    of_compose,
    of_kubernetes,
)
from tests.deploy.test_containers import MEMORY, QWEN3_4B, SHAPE, as_of_up, engine_of, flags, the
from tests.deploy.test_kubernetes import VERSIONS, of_kind, pods, selected
from tests.unit.layout import shapes

JUDGE = [
    "CLAWLOOP_JUDGE_MODEL=Qwen3-4B",
    "JUDGE_TOOL_CHOICE=--enable-auto-tool-choice",
    "JUDGE_TOOL_PARSER=hermes",
    "JUDGE_REASONING_PARSER=qwen3",
]
_PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
for arguments in json.load(sys.stdin):
    validate_parsed_serve_args(make_arg_parser(FlexibleArgumentParser()).parse_args(arguments))
"""


def overlay(folder: Path, *components: str, literals: list[str]) -> list[dict[str, Any]]:
    """Base and components, as an overlay of one's own puts them together."""
    kubernetes = os.path.relpath((DEPLOY / "kubernetes").resolve(), folder.resolve())
    settings = {"name": "clawloop", "behavior": "merge", "literals": literals}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{kubernetes}/base"],
        "components": [f"{kubernetes}/components/{name}" for name in components],
        "configMapGenerator": [settings],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return built(folder)


def judge_of_plan(gpus: tuple[int, ...] | None) -> Process:
    sets = {} if gpus is None else {"serve": (0,), "train": (1,), "judge": (2,)}
    asked = shapes.request(SHAPE, gpus, memory=MEMORY, judge_model=SHAPE, **sets)  # type: ignore[arg-type]
    [judge] = [process for process in layouts.plan(asked).processes if process.role is Role.JUDGE]
    return judge


def judge_engine(containers: list[Container]) -> Container:
    [found] = [container for container in containers if container.name == "judge-engine"]
    return found


def is_like_up(engine: Container, gpus: tuple[int, ...] | None) -> None:
    started = launch(QWEN3_4B, EngineOptions(8100, judge_of_plan(gpus).arguments), {})
    assert flags(engine.words) == {**flags(started.command), "--host": ["0.0.0.0"]}
    own = {name: value for name, value in started.environment.items() if "LORA" not in name}
    assert own.items() <= engine.environment.items()


@pytest.mark.parametrize(("device", "gpus"), [("cpu", None), ("cuda", (80, 80, 80))])
def test_compose_has_a_judge_engine_in_a_profile(device: str, gpus: tuple[int, ...] | None, tmp_path: Path) -> None:
    assert "judge-engine" not in composed(device, tmp_path)["services"]
    asked = {"CLAWLOOP_JUDGE_URL": "http://judge-engine:8100", "CLAWLOOP_JUDGE_MODEL": "Qwen3-4B"}
    project = json.loads(compose(device, filled_in(tmp_path, **asked), "judge").stdout)
    engine = judge_engine(of_compose(project))
    is_like_up(engine, gpus)
    services = project["services"]
    assert services["judge-engine"]["networks"].keys() == {"engines"}
    assert "ports" not in services["judge-engine"]
    judge = services["judge"]["environment"]
    assert judge["CLAWLOOP_JUDGE_URL"] == f"http://judge-engine:{engine.option('--port')}"
    assert judge["CLAWLOOP_JUDGE_MODEL"] == engine.option("--served-model-name")
    assert engine.probes == ((8100, "/health"),)
    if gpus is not None:
        [gpu] = services["judge-engine"]["deploy"]["resources"]["reservations"]["devices"]
        assert gpu["device_ids"] == ["1"]
    other = {"JUDGE_MODEL_FOLDER": "/srv/Other", "JUDGE_MODEL_NAME": "Other", "JUDGE_REASONING": ""}
    services = json.loads(compose(device, filled_in(tmp_path, **asked, **other), "judge").stdout)["services"]
    [model] = services["judge-engine"]["volumes"]
    assert (model["source"], model["target"], model["read_only"]) == ("/srv/Other", "/models/Other", True)
    assert "--reasoning-parser" not in services["judge-engine"]["command"]
    assert "--reasoning-parser" in services["engine"]["command"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compose_gives_engines_a_quantised_copy_and_the_trainer_the_model(device: str, tmp_path: Path) -> None:
    given = {"SERVE_MODEL_FOLDER": "/srv/models/Qwen3-4B-AWQ", "TRAINER_MEMORY": "--max-tokens 9 --engines-quantised"}
    project = json.loads(compose(device, filled_in(tmp_path, **given)).stdout)
    sources = {
        name: [mount["source"] for mount in project["services"][name]["volumes"] if mount["type"] == "bind"]
        for name in ("engine", "trainer")
    }
    assert sources == {"engine": ["/srv/models/Qwen3-4B-AWQ"], "trainer": ["/srv/models/Qwen3-4B"]}
    assert "--engines-quantised" in the(of_compose(project), "worker", "trainer").words


def test_kubernetes_has_a_judge_engine_that_all_who_ask_the_judge_reach(tmp_path: Path) -> None:
    resources = overlay(tmp_path, "judge-engine", literals=JUDGE)
    for version in VERSIONS:
        for resource in resources:
            kubernetes_validate.validate(resource, version, strict=True)
    [namespace] = of_kind(resources, "Namespace")
    assert {one["metadata"].get("namespace", namespace) for one in resources} == {namespace}
    containers = of_kubernetes(resources)
    engine = judge_engine(containers)
    is_like_up(engine, (80, 80, 80))
    assert engine.image == engine_of(one for one in containers if one.name == "vllm").image
    assert engine.writable["/models"] is False
    judge = the(containers, "worker", "judge").environment
    service = of_kind(resources, "Service")["judge-engine"]
    assert judge["CLAWLOOP_JUDGE_URL"] == f"http://judge-engine:{service['spec']['ports'][0]['port']}"
    assert judge["CLAWLOOP_JUDGE_MODEL"] == engine.option("--served-model-name")
    assert selected(resources, service["spec"]["selector"]) == {"judge-engine"}
    policy = of_kind(resources, "NetworkPolicy")["judge-engine"]["spec"]
    [rule] = policy["ingress"]
    assert [selected(resources, peer["podSelector"]["matchLabels"]) for peer in rule["from"]] == [
        {"judge"},
        {"gateway"},
    ]
    # As restricted as every other pod, and without the secret.
    found = pods(resources)
    pod, hardened = found["judge-engine"]["spec"], found["engine"]["spec"]
    for key in ("securityContext", "automountServiceAccountToken", "enableServiceLinks"):
        assert pod[key] == hardened[key]
    assert pod["containers"][0]["securityContext"] == hardened["containers"][0]["securityContext"]
    assert "secretRef" not in str(pod)


def test_kubernetes_gives_engines_a_quantised_copy_and_the_trainer_the_model(tmp_path: Path) -> None:
    containers = of_kubernetes(overlay(tmp_path, "serve-model", literals=["SERVE_MODEL=/models/Qwen3-4B-AWQ"]))
    engine, trainer = engine_of(containers), the(containers, "worker", "trainer")
    assert engine.option("--model") == "/models/Qwen3-4B-AWQ"
    assert engine.option("--served-model-name") == "Qwen3-4B"
    assert trainer.environment["CLAWLOOP_MODEL"] == "/models/Qwen3-4B"
    assert "--engines-quantised" in trainer.words


def test_parsers_of_another_family_are_settings(tmp_path: Path) -> None:
    literals = ["TOOL_CHOICE=--no-enable-auto-tool-choice", "TOOL_PARSER=", "REASONING_PARSER="]
    plain = engine_of(of_kubernetes(overlay(tmp_path, literals=literals)))
    llama = ["TOOL_PARSER=llama3_json", "REASONING_PARSER="]
    other = engine_of(of_kubernetes(overlay(tmp_path, literals=llama)))
    assert other.option("--tool-call-parser") == "llama3_json"
    # vLLM takes an empty parser for none.
    asked = json.dumps([list(engine.words) for engine in (plain, other)])
    done = subprocess.run([sys.executable, "-c", _PARSE], input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_components_say_how_they_are_used() -> None:
    for folder in (DEPLOY / "kubernetes" / "components").iterdir():
        comment = re.match(r"(#.*\n)+", (folder / "kustomization.yaml").read_text())
        assert comment is not None
        assert f"components: [../../components/{folder.name}]" in comment[0]


def engine_for_people(gpus: tuple[int, ...] | None) -> Process:
    """The engine that `clawloop plan --policies 20` lays out."""
    limits = limits_for(SHAPE, TrainingNeeds(), policies=20)
    [engine] = [
        process
        for process in layouts.plan(shapes.request(SHAPE, gpus, limits=limits, memory=MEMORY)).processes
        if process.role is Role.ENGINE
    ]
    return engine


@pytest.mark.parametrize(("device", "gpus"), [("cpu", None), ("cuda", (80,))])
def test_compose_follows_the_plan_for_many_policies(device: str, gpus: tuple[int, ...] | None, tmp_path: Path) -> None:
    planned = engine_for_people(gpus)
    memory = flags(planned.arguments)
    names = ("--max-num-seqs", "--max-num-batched-tokens", "--kv-cache-memory-bytes", "--gpu-memory-utilization")
    given = {"ENGINE_ADAPTERS": "--max-loras 32 --max-cpu-loras 64"}
    if gpus is None:
        given["CPU_CACHE_BYTES"] = memory["--kv-cache-memory-bytes"][0]
    else:
        given["ENGINE_MEMORY"] = " ".join(f"{name} {memory[name][0]}" for name in names if name in memory)
    engine = engine_of(of_compose(json.loads(compose(device, filled_in(tmp_path, **given)).stdout)))
    started = as_of_up(engine, planned.arguments)
    assert flags(engine.words) == {**flags(started.command), "--host": ["0.0.0.0"]}


def test_kubernetes_follows_the_plan_for_many_policies(tmp_path: Path) -> None:
    planned = engine_for_people((80, 80))
    resources = overlay(tmp_path, literals=["MAX_LORAS=32", "MAX_CPU_LORAS=64"])
    engine = engine_of(one for one in of_kubernetes(resources) if one.name == "vllm")
    started = as_of_up(engine, planned.arguments)
    assert flags(engine.words) == {**flags(started.command), "--host": ["0.0.0.0"]}
