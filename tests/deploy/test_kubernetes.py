"""deploy/kubernetes: valid against the schemas of Kubernetes, with consistent references between resources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from tests.deploy.containers import DEPLOY, KUSTOMIZATIONS, kustomized

Resource = dict[str, Any]
# The oldest release with preStop's `sleep` enabled, and the newest that the validator knows.
VERSIONS = ("1.30", "1.37")
LONG_RUNNING = {"gateway", "orchestrator", "judge", "engine", "trainer"}


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def resources(request: pytest.FixtureRequest) -> list[Resource]:
    return kustomized(request.param)


def of_kind(resources: list[Resource], *kinds: str) -> dict[str, Resource]:
    return {resource["metadata"]["name"]: resource for resource in resources if resource["kind"] in kinds}


def pods(resources: list[Resource]) -> dict[str, Resource]:
    """Templates of pods, by the name of what makes them."""
    makers = of_kind(resources, "Deployment", "StatefulSet", "Job")
    return {name: maker["spec"]["template"] for name, maker in makers.items()}


def containers(resources: list[Resource]) -> Iterator[tuple[str, Resource, Resource]]:
    for name, pod in pods(resources).items():
        for container in pod["spec"]["containers"]:
            yield f"{name}/{container['name']}", container, pod["spec"]


def selected(resources: list[Resource], labels: dict[str, str]) -> set[str]:
    return {name for name, pod in pods(resources).items() if labels.items() <= pod["metadata"]["labels"].items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_is_valid(resources: list[Resource], version: str) -> None:
    for resource in resources:
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("overlay", list(KUSTOMIZATIONS))
def test_all_resources_are_in_one_namespace(overlay: str) -> None:
    resources = kustomized(overlay)
    [namespace] = of_kind(resources, "Namespace")
    others = [resource for resource in resources if resource["kind"] != "Namespace"]
    assert {resource["metadata"]["namespace"] for resource in others} == {namespace}


def test_every_container_has_probes_and_resources(resources: list[Resource]) -> None:
    for name, container, _ in containers(resources):
        probes = {kind for kind in ("startupProbe", "livenessProbe", "readinessProbe") if kind in container}
        assert len(probes) == (0 if name == "migrate/migrate" else 3), name
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), name
        assert "memory" in container["resources"]["limits"], name


def test_probes_are_http_and_give_workers_time_to_answer(resources: list[Resource]) -> None:
    """A busy worker answers after seconds; Kubernetes' default for the probe is 1 s."""
    for name, container, _ in containers(resources):
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            if kind in container:
                assert "httpGet" in container[kind], name
                if container[kind]["httpGet"]["port"] == "health":
                    assert container[kind]["timeoutSeconds"] > 5, name


def test_every_container_is_restricted(resources: list[Resource]) -> None:
    for name, container, pod in containers(resources):
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["automountServiceAccountToken"] is False, name
        # A Service named `clawloop…` would set CLAWLOOP_… variables.
        assert pod["enableServiceLinks"] is False, name
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name


def test_pods_run_as_the_user_of_the_image(resources: list[Resource]) -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    for _, _, pod in containers(resources):
        user = pod["securityContext"]["runAsUser"]
        assert f"useradd --uid {user} " in dockerfile
        assert f"USER {user}:{pod['securityContext']['runAsGroup']}\n" in dockerfile


def test_every_volume_exists(resources: list[Resource]) -> None:
    claims = of_kind(resources, "PersistentVolumeClaim")
    used = set()
    for name, container, pod in containers(resources):
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        templates = of_kind(resources, "StatefulSet").get(name.partition("/")[0], {}).get("spec", {})
        own = {template["metadata"]["name"] for template in templates.get("volumeClaimTemplates", [])}
        for mount in container.get("volumeMounts", []):
            assert mount["name"] in volumes.keys() | own, name
            claim = volumes.get(mount["name"], {}).get("persistentVolumeClaim")
            if claim is not None:
                used.add(claim["claimName"])
                assert claim.get("readOnly", False) <= mount.get("readOnly", False), name
    assert used == set(claims)
    # Their pods may run on different nodes.
    assert {tuple(claim["spec"]["accessModes"]) for claim in claims.values()} == {("ReadWriteMany",)}


def test_the_volume_of_models_can_be_filled() -> None:
    pod = yaml.safe_load((DEPLOY / "kubernetes" / "fill-models.yaml").read_text())
    for version in VERSIONS:
        kubernetes_validate.validate(pod, version, strict=True)
    base = kustomized("cuda")
    [volume] = pod["spec"]["volumes"]
    claim = of_kind(base, "PersistentVolumeClaim")[volume["persistentVolumeClaim"]["claimName"]]
    assert pod["metadata"]["namespace"] == claim["metadata"]["namespace"]
    hardened = pods(base)["engine"]["spec"]  # its namespace takes no pod that is less so
    assert pod["spec"]["securityContext"] == hardened["securityContext"]
    [shell] = pod["spec"]["containers"]
    assert shell["securityContext"] == hardened["containers"][0]["securityContext"]


def test_every_config_map_and_secret_exists(resources: list[Resource]) -> None:
    example = next(yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / "secret.example.yaml").read_text()))
    for name, container, _ in containers(resources):
        for source in container["envFrom"]:
            if "configMapRef" in source:
                assert source["configMapRef"]["name"] in of_kind(resources, "ConfigMap"), name
            else:
                assert source["secretRef"]["name"] == example["metadata"]["name"], name
    assert of_kind(resources, "Secret") == {}


def test_vllm_does_not_get_the_database_password(resources: list[Resource]) -> None:
    [vllm] = [container for name, container, _ in containers(resources) if name == "engine/vllm"]
    assert [source for source in vllm["envFrom"] if "secretRef" in source] == []


def test_services_select_pods_and_ports(resources: list[Resource]) -> None:
    services = of_kind(resources, "Service")
    assert services.keys() == {"gateway", "engine"}
    for name, service in services.items():
        assert selected(resources, service["spec"]["selector"]) == {name}
        [pod] = [pod for maker, pod in pods(resources).items() if maker == name]
        named = {port["name"] for container in pod["spec"]["containers"] for port in container.get("ports", [])}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named
    for name, maker in of_kind(resources, "StatefulSet").items():
        assert maker["spec"]["serviceName"] == name
    # DNS names of single pods, also before they are ready.
    assert services["engine"]["spec"]["clusterIP"] == "None"
    assert services["engine"]["spec"]["publishNotReadyAddresses"] is True


def test_controllers_select_their_own_pods(resources: list[Resource]) -> None:
    for name, maker in of_kind(resources, "Deployment", "StatefulSet").items():
        assert selected(resources, maker["spec"]["selector"]["matchLabels"]) == {name}


def test_disruption_budgets_allow_drains(resources: list[Resource]) -> None:
    makers = of_kind(resources, "Deployment", "StatefulSet")
    assert makers.keys() == LONG_RUNNING
    for name, budget in of_kind(resources, "PodDisruptionBudget").items():
        assert selected(resources, budget["spec"]["selector"]["matchLabels"]) == {name}
        if "minAvailable" in budget["spec"]:  # equal would block every drain
            assert makers[name]["spec"]["replicas"] > budget["spec"]["minAvailable"]
    # A pool has one trainer; a budget for it would block drains.
    assert makers.keys() - of_kind(resources, "PodDisruptionBudget").keys() == {"trainer"}
    assert makers["gateway"]["spec"]["replicas"] == 2
    assert makers["trainer"]["spec"]["replicas"] == 1
    for alone in ("trainer", "orchestrator"):  # two orchestrators of two versions would not know each other's updates
        assert makers[alone]["spec"]["strategy"] == {"type": "Recreate"}


def test_only_gateways_and_judges_reach_engines(resources: list[Resource]) -> None:
    policies = of_kind(resources, "NetworkPolicy")
    assert policies["default-deny"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    for name in ("engine", "gateway"):
        assert selected(resources, policies[name]["spec"]["podSelector"]["matchLabels"]) == {name}
    [rule] = policies["engine"]["spec"]["ingress"]
    let_in = [selected(resources, peer["podSelector"]["matchLabels"]) for peer in rule["from"]]
    assert let_in == [{"gateway"}, {"judge"}]
    assert all(peer.keys() == {"podSelector"} for peer in rule["from"])  # of this namespace
    assert [port["port"] for port in rule["ports"]] == ["vllm"]
    [rule] = policies["gateway"]["spec"]["ingress"]
    assert rule == {"ports": [{"protocol": "TCP", "port": "api"}]}
    assert policies.keys() == {"default-deny", "engine", "gateway", "health"}


def test_metrics_of_every_worker_can_be_read(resources: list[Resource]) -> None:
    spec = of_kind(resources, "NetworkPolicy")["health"]["spec"]
    [selector] = spec["podSelector"]["matchExpressions"]
    assert spec["ingress"] == [{"ports": [{"protocol": "TCP", "port": "health"}]}]
    served = {
        name.partition("/")[0]
        for name, container, _ in containers(resources)
        if any(port["name"] == "health" for port in container.get("ports", []))
    }
    assert set(selector["values"]) == served == LONG_RUNNING - {"gateway"}


def test_only_cuda_requests_gpus() -> None:
    def asking(device: str) -> set[str]:
        limits = {name: container["resources"]["limits"] for name, container, _ in containers(kustomized(device))}
        return {name for name, limit in limits.items() if "nvidia.com/gpu" in limit}

    assert asking("cpu") == set()
    assert asking("cuda") == {"engine/vllm", "trainer/trainer"}
