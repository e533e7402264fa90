"""deploy/compose.yaml: networks, start order, volumes, secrets, and the variables of its env file."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from clawloop.app.local.services import temporal_server
from tests.deploy.containers import COMPOSE_FILES, DEPLOY, FILLED_IN, compose, composed, filled_in

Services = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=list(COMPOSE_FILES))
def project(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return composed(request.param, tmp_path_factory.mktemp("compose"))


@pytest.fixture
def services(project: dict[str, Any]) -> Services:
    found: Services = project["services"]
    return found


def on(services: Services, network: str) -> set[str]:
    return {name for name, service in services.items() if network in service["networks"]}


@pytest.mark.parametrize("missing", [*FILLED_IN, "MODEL_FOLDER", "MODEL_NAME"])
def test_a_missing_variable_is_named(tmp_path: Path, missing: str) -> None:
    refused = compose("cpu", filled_in(tmp_path, **{missing: ""}))
    assert refused.returncode != 0
    assert f"required variable {missing} is missing a value: set it in deploy/.env" in refused.stderr


def test_the_example_names_every_variable(tmp_path: Path) -> None:
    """Variables with a default are commented out, with that default."""
    example = (DEPLOY / "compose.env.example").read_text()
    values = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", example, flags=re.MULTILINE)) | FILLED_IN
    values.pop("COMPOSE_FILE")
    for device in COMPOSE_FILES:
        stated = compose(device, filled_in(tmp_path, **values)).stdout
        assert stated
        assert stated == compose(device, filled_in(tmp_path)).stdout
    used = {
        name for file in COMPOSE_FILES["cuda"] for name in re.findall(r"\$\{([A-Z_]+)", (DEPLOY / file).read_text())
    }
    assert used - {"CLAWLOOP_MAX_LORA_RANK"} == set(values)


def test_only_gateways_judges_commands_and_agent_reach_the_engine(project: dict[str, Any], services: Services) -> None:
    assert services["engine"]["networks"].keys() == {"engines"}
    assert on(services, "engines") == {"admin", "engine", "engine-agent", "gateway", "judge"}
    assert project["networks"]["engines"]["internal"] is True
    assert "ports" not in services["engine"]


def test_only_temporal_reaches_its_database(project: dict[str, Any], services: Services) -> None:
    assert services["temporal-postgres"]["networks"].keys() == {"temporal"}
    assert on(services, "temporal") == {"temporal", "temporal-postgres", "temporal-schema"}
    assert project["networks"]["temporal"]["internal"] is True


def test_ports_are_published_on_loopback_by_default(services: Services) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published.keys() == {"gateway", "temporal-ui"}
    assert {port["host_ip"] for ports in published.values() for port in ports} == {"127.0.0.1"}


@pytest.mark.parametrize("device", list(COMPOSE_FILES))
def test_prometheus_reaches_each_of_our_processes(tmp_path: Path, device: str) -> None:
    read = yaml.safe_load((DEPLOY / "grafana" / "prometheus.yml").read_text())
    assert all((DEPLOY / "grafana" / file).is_file() for file in read["rule_files"])
    [job] = read["scrape_configs"]
    ports = {name: found["port"] for found in job["dns_sd_configs"] for name in found["names"]}
    assert ports.pop("gateway") == 30000
    services = json.loads(compose(device, filled_in(tmp_path), "environment").stdout)["services"]
    commands = {name: service["command"] or () for name, service in services.items()}
    served = {name: words for name, words in commands.items() if "--health-port" in words}
    assert ports == {name: int(words[words.index("--health-port") + 1]) for name, words in served.items()}
    for name, words in served.items():
        assert words[words.index("--health-host") + 1] == "0.0.0.0", name
        assert services[name]["networks"].keys() & {"services", "environments"}, name


def test_each_gateway_has_a_port_of_its_own(services: Services) -> None:
    gateway = services["gateway"]
    [port] = gateway["ports"]
    first, _, last = port["published"].partition("-")
    assert int(last) - int(first) + 1 == gateway["deploy"]["replicas"] == 2


def test_services_start_after_the_jobs_they_need(services: Services) -> None:
    done = "service_completed_successfully"
    for name in ("gateway", "orchestrator", "judge", "engine-agent", "trainer", "admin"):
        conditions = {needed: how["condition"] for needed, how in services[name]["depends_on"].items()}
        assert conditions == {"migrate": done, "temporal-namespace": done}
    assert services["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    assert services["temporal"]["depends_on"]["temporal-schema"]["condition"] == done


def test_restart_policies(services: Services) -> None:
    policies = {name: service["restart"] for name, service in services.items()}
    jobs = {"migrate", "temporal-schema", "temporal-namespace"}
    assert {name for name, policy in policies.items() if policy == "on-failure"} == jobs
    assert {name for name, policy in policies.items() if policy != "unless-stopped"} - jobs == {"admin"}


def test_data_is_on_volumes(project: dict[str, Any], services: Services) -> None:
    kept = {
        (name, mount["source"])
        for name, service in services.items()
        for mount in service.get("volumes", [])
        if mount["type"] == "volume" and not mount.get("read_only", False)
    }
    assert kept == {
        ("admin", "gateways"),
        ("gateway", "gateways"),
        ("orchestrator", "adapters"),
        ("postgres", "postgres"),
        ("temporal-postgres", "temporal-postgres"),
        ("trainer", "adapters"),
    }
    assert project["volumes"].keys() == {volume for _, volume in kept}


def test_a_missing_model_folder_is_not_created(services: Services) -> None:
    for name in ("engine", "trainer"):
        [model] = [mount for mount in services[name]["volumes"] if mount["type"] == "bind"]
        assert model["bind"] == {"create_host_path": False}


def test_passwords_reach_only_the_services_that_need_them(services: Services) -> None:
    having = {
        secret: {name for name, service in services.items() if secret in str(service.get("environment", {}))}
        for secret in FILLED_IN.values()
    }
    assert having == {
        "secret1": {"admin", "engine-agent", "gateway", "judge", "migrate", "orchestrator", "postgres", "trainer"},
        "secret2": {"temporal", "temporal-postgres", "temporal-schema"},
        "secret3": {"admin", "engine", "engine-agent", "gateway", "judge"},
    }


def test_settings_in_the_env_file_are_passed_on(tmp_path: Path) -> None:
    given = {"CLAWLOOP_MAX_LORA_RANK": "64", "CLAWLOOP_SESSION_IDLE_MINUTES": "5", "CLAWLOOP_JUDGE_URL": "http://judge"}
    services = json.loads(compose("cpu", filled_in(tmp_path, **given)).stdout)["services"]
    assert given.items() <= services["judge"]["environment"].items()
    ui, proxies = "https://temporal.example.org", "172.18.0.1"
    passed_on = {"CLAWLOOP_TEMPORAL_UI": ui, "CLAWLOOP_TRUSTED_PROXIES": proxies}
    services_then = json.loads(compose("cpu", filled_in(tmp_path, **passed_on)).stdout)["services"]
    assert passed_on.items() <= services_then["gateway"]["environment"].items()
    engine = services["engine"]["command"]
    assert engine[engine.index("--max-lora-rank") + 1] == "64"


def test_only_cuda_reserves_gpus(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("compose")
    assert "devices" not in str(composed("cpu", folder)["services"])
    services = composed("cuda", folder)["services"]
    for name in ("engine", "trainer"):
        [gpu] = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (gpu["driver"], gpu["capabilities"]) == ("nvidia", ["gpu"])
        assert services[name]["build"]["args"] == {"DEVICE": "cuda"}


def test_temporal_has_the_settings_of_clawloop_up(tmp_path: Path) -> None:
    command = temporal_server.launch(tmp_path, temporal_server.Ports(1, 2, 3), {}).command
    pairs = [word.split("=") for flag, word in pairwise(command) if flag == "--dynamic-config-value"]
    given = yaml.safe_load((DEPLOY / "temporal" / "dynamic.yaml").read_text())
    assert {name: yaml.safe_load(value) for name, value in pairs} == {
        name: one["value"] for name, [one] in given.items()
    }
    namespace = (DEPLOY / "temporal" / "namespace.sh").read_text()
    assert f"--namespace {temporal_server.NAMESPACE} " in namespace
    assert f"--retention {int(temporal_server.RETENTION.total_seconds()) // 3600}h" in namespace


def test_our_containers_write_only_where_something_is_mounted(services: Services) -> None:
    """As pods do: the root file system is read-only, and no capability is kept. The image's user is not root."""
    ours = {name: service for name, service in services.items() if service["image"].startswith("clawloop-")}
    for name, service in ours.items():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        kinds = {mount.partition(":")[0]: mount.partition(":")[2] for mount in service["tmpfs"]}
        if service["image"].startswith("clawloop-models"):
            # Kernels are compiled at run time, into a home that the image's user may write.
            assert kinds == {"/tmp": "exec", "/home/clawloop": "exec,uid=10001,gid=10001,mode=0700"}, name
        else:
            assert kinds == {"/tmp": ""}, name
    assert len(ours) == 8
