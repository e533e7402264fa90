"""Workers of environments in compose and Kubernetes: what they run, what they know and reach, and that they may make
sandboxes."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from clawloop.app.cli.remote_environment import _parser, worker_of
from clawloop.core.errors import SetupError
from clawloop.environments.choice import DEFAULT_ENVIRONMENTS, gateway_address
from tests.deploy.containers import DEPLOY, built, compose, filled_in
from tests.deploy.test_further_engines import overlay
from tests.deploy.test_kubernetes import VERSIONS, of_kind, pods, selected

Resource = dict[str, Any]
KEY = "CLAWLOOP_WORKER_KEY"
FOLDER = DEPLOY / "kubernetes" / "components" / "environments"


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> list[Resource]:
    """Base and component, as an overlay of one's own puts them together."""
    return overlay(tmp_path_factory.mktemp("overlay"), "environments", literals=["MODEL_NAME=Qwen3-4B"])


@pytest.fixture
def pod(resources: list[Resource]) -> Resource:
    spec: Resource = pods(resources)["environment"]["spec"]
    return spec


@pytest.fixture
def service(tmp_path: Path) -> Resource:
    """Of compose, as it is with the profile and a key in the env file."""
    project = json.loads(compose("cpu", filled_in(tmp_path, WORKER_KEY="key"), "environment").stdout)
    found: Resource = project["services"]["environment"] | {"project": project}
    return found


def check_options(words: list[str], environment: dict[str, str]) -> None:
    """The program understands them, and all tasks that need nothing else are played."""
    worker = worker_of(_parser().parse_args(words), environment)
    assert (worker.key, set(worker.sandboxed)) == ("key", set(DEFAULT_ENVIRONMENTS))
    assert gateway_address(worker.gateway)[1] == 30000
    assert worker.temporal == environment["TEMPORAL_ADDRESS"]
    assert worker.health[1] == 8081


def test_every_resource_is_valid(resources: list[Resource]) -> None:
    for version in VERSIONS:
        for resource in resources:
            kubernetes_validate.validate(resource, version, strict=True)


def test_the_pods_run_the_program_with_a_key_and_without_a_secret_of_ours(
    resources: list[Resource], pod: Resource
) -> None:
    [container] = pod["containers"]
    assert container["envFrom"] == [
        {"configMapRef": {"name": of_config(resources)["metadata"]["name"]}},
        {"secretRef": {"name": "clawloop-worker"}},
    ]
    check_options(container["args"], of_config(resources)["data"] | {KEY: "key"})
    # The key is the one thing that their secret holds, as the comment has it made.
    assert f"clawloop-worker --from-literal={KEY}=" in (FOLDER / "kustomization.yaml").read_text()
    assert container["image"] == "clawloop-environment:0.1.0"
    ours = pods(resources)["orchestrator"]["spec"]["containers"][0]["envFrom"]
    assert {"secretRef": {"name": "clawloop"}} in ours
    base = next(
        one
        for one in resources
        if one["kind"] == "ConfigMap" and one["metadata"]["name"] != of_config(resources)["metadata"]["name"]
    )
    assert of_config(resources)["data"]["TEMPORAL_ADDRESS"] == base["data"]["TEMPORAL_ADDRESS"]


def of_config(resources: list[Resource]) -> Resource:
    [found] = [
        one
        for one in resources
        if one["kind"] == "ConfigMap" and one["metadata"]["name"].startswith("clawloop-environment")
    ]
    return found


def test_the_pods_are_in_a_namespace_of_their_own_which_alone_is_not_restricted(resources: list[Resource]) -> None:
    levels = {
        name: namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for name, namespace in of_kind(resources, "Namespace").items()
    }
    assert levels == {"clawloop": "restricted", "clawloop-environments": "privileged"}
    there = {
        (
            one["kind"],
            one["metadata"]["name"].rpartition("-")[0] if one["kind"] == "ConfigMap" else one["metadata"]["name"],
        )
        for one in resources
        if one["metadata"].get("namespace") == "clawloop-environments"
    }
    assert there == {
        ("ConfigMap", "clawloop-environment"),
        ("Deployment", "environment"),
        ("NetworkPolicy", "environment"),
        ("PodDisruptionBudget", "environment"),
    }


def test_the_pods_may_make_sandboxes_and_nothing_more(resources: list[Resource], pod: Resource) -> None:
    """By user namespaces of a user without capabilities, each with a /proc of its own."""
    hardened = pods(resources)["judge"]["spec"]
    unconfined = {"seccompProfile": {"type": "Unconfined"}, "appArmorProfile": {"type": "Unconfined"}}
    assert pod["securityContext"] == hardened["securityContext"] | unconfined
    [container] = pod["containers"]
    judge = hardened["containers"][0]["securityContext"]
    assert container["securityContext"] == judge | {"procMount": "Unmasked"}
    assert pod["hostUsers"] is False  # without it Kubernetes refuses a /proc that is shown whole
    for key in ("automountServiceAccountToken", "enableServiceLinks"):
        assert pod[key] == hardened[key]
    assert container["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
    assert pod["volumes"] == [{"name": "tmp", "emptyDir": {}}]


def test_the_pods_reach_gateways_and_temporal_and_are_asked_for_their_health(
    resources: list[Resource], pod: Resource
) -> None:
    policy = next(
        one["spec"]
        for one in resources
        if one["kind"] == "NetworkPolicy" and one["metadata"]["namespace"] == "clawloop-environments"
    )
    assert (policy["podSelector"], policy["policyTypes"]) == ({}, ["Ingress", "Egress"])
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": "health"}]}]
    dns, gateways, temporal = policy["egress"]
    assert {port["port"] for port in dns["ports"]} == {53}
    [peer] = gateways["to"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "clawloop"}
    assert selected(resources, peer["podSelector"]["matchLabels"]) == {"gateway"}
    [container] = pod["containers"]
    gateway = of_kind(resources, "Service")["gateway"]
    assert {port["port"] for port in gateways["ports"]} == {port["port"] for port in gateway["spec"]["ports"]}
    url = next(word for word in container["args"] if word.startswith("--gateway="))
    host, port = gateway_address(url.removeprefix("--gateway="))
    assert (host, port) == (f"gateway.{gateway['metadata']['namespace']}.svc", 30000)
    # Gateways answer to this name.
    allowed = pods(resources)["gateway"]["spec"]["containers"][0]["args"]
    assert f"--allowed-host={host}" in allowed
    assert temporal == {"ports": [{"protocol": "TCP", "port": 7233}]}
    [health] = container["ports"]
    assert (health["name"], health["containerPort"]) == ("health", 8081)
    probes = [container[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert {(probe["port"], probe["path"]) for probe in probes} == {("health", "/readyz"), ("health", "/healthz")}


def test_a_team_sets_registry_temporal_and_storage_class_once(tmp_path: Path) -> None:
    """As a copy of the overlay `team` does that names the component beside its own."""
    team = DEPLOY / "kubernetes" / "overlays" / "team"
    text = (team / "kustomization.yaml").read_text()
    for known, own in (
        ("registry.example.org", "registry.ours"),
        ("temporal-frontend.temporal:", "temporal.ours:"),
        ("STORAGE_CLASS=shared", "STORAGE_CLASS=ours"),
    ):
        assert known in text
        text = text.replace(known, own)
    copied = yaml.safe_load(text)
    copied["components"].append("../../components/environments")
    for kind in ("resources", "components"):
        copied[kind] = [os.path.relpath((team / path).resolve(), tmp_path.resolve()) for path in copied[kind]]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(copied))
    resources = built(tmp_path)
    [container] = pods(resources)["environment"]["spec"]["containers"]
    assert container["image"] == "registry.ours/clawloop-environment:0.1.0"
    assert of_config(resources)["data"] == {"TEMPORAL_ADDRESS": "temporal.ours:7233"}
    assert of_kind(resources, "PersistentVolumeClaim")["artifacts"]["spec"]["storageClassName"] == "ours"


def test_controllers_and_budgets_select_the_pods(resources: list[Resource]) -> None:
    deployment = of_kind(resources, "Deployment")["environment"]["spec"]
    budget = of_kind(resources, "PodDisruptionBudget")["environment"]["spec"]
    for selector in (deployment["selector"], budget["selector"]):
        assert selected(resources, selector["matchLabels"]) == {"environment"}
    assert (deployment["replicas"], budget["maxUnavailable"]) == (2, 1)


def test_gateways_share_what_agents_left(resources: list[Resource]) -> None:
    """A worker gives it to one gateway, and asks any for it."""
    gateway = pods(resources)["gateway"]["spec"]
    assert {"name": "artifacts", "mountPath": "/data/artifacts"} in gateway["containers"][0]["volumeMounts"]
    assert {"name": "artifacts", "persistentVolumeClaim": {"claimName": "artifacts"}} in gateway["volumes"]
    claim = of_kind(resources, "PersistentVolumeClaim")["artifacts"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["metadata"]["namespace"] == of_kind(resources, "StatefulSet")["gateway"]["metadata"]["namespace"]


def test_compose_runs_the_program_in_a_profile(service: Resource) -> None:
    check_options(service["command"], service["environment"])
    assert service["image"] == "clawloop-environment:0.1.0"
    assert service["build"]["target"] == "environment"
    assert f"127.0.0.1:{8081}/readyz" in str(service["healthcheck"]["test"])
    assert set(service["environment"]) == {KEY, "TEMPORAL_ADDRESS"}


def test_without_a_key_compose_is_unchanged_and_the_worker_says_what_is_missing(tmp_path: Path) -> None:
    project = json.loads(compose("cpu", filled_in(tmp_path)).stdout)
    assert "environment" not in project["services"]
    asked = json.loads(compose("cpu", filled_in(tmp_path), "environment").stdout)["services"]["environment"]
    assert asked["environment"][KEY] == ""
    with pytest.raises(SetupError, match="no key: set CLAWLOOP_WORKER_KEY"):
        worker_of(_parser().parse_args(asked["command"]), asked["environment"])


def test_compose_lets_the_worker_make_sandboxes_and_reach_gateways_and_temporal_alone(service: Resource) -> None:
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert set(service["security_opt"]) == {
        "no-new-privileges:true",
        "seccomp=unconfined",
        "apparmor=unconfined",
        "systempaths=unconfined",
    }
    assert set(service["networks"]) == {"environments"}
    assert service["project"]["networks"]["environments"]["internal"] is True
    there = {name for name, one in service["project"]["services"].items() if "environments" in one["networks"]}
    assert there == {"environment", "gateway", "temporal"}
    assert "volumes" not in service
    assert "ports" not in service


def test_both_have_the_same_options(service: Resource, pod: Resource) -> None:
    by_kubernetes = {word for word in pod["containers"][0]["args"] if not word.startswith("--gateway")}
    words = service["command"]
    pairs = {f"{flag}={value}" for flag, value in pairwise(words) if flag.startswith("--")}
    assert {pair for pair in pairs if not pair.startswith("--gateway")} == by_kubernetes


def test_the_image_is_built_from_the_distribution_and_runs_it() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert "PROJECT=./deploy/environment EXTRAS=sandbox INTO=/opt/clawloop bash deploy/install.sh" in dockerfile
    stage = dockerfile.partition("FROM runtime AS environment\n")[2].partition("\nFROM ")[0]
    assert 'ENTRYPOINT ["clawloop-environment"]' in stage
    for file in FOLDER.glob("*.yaml"):
        assert list(yaml.safe_load_all(file.read_text())), file
