"""Containers as deploy/ describes them, read with the programs that will read them: docker-compose and kubectl."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.stated import ROOT

DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
# Of what a person fills in.
FILLED_IN = {"POSTGRES_PASSWORD": "secret1", "TEMPORAL_POSTGRES_PASSWORD": "secret2", "ENGINE_SECRET": "secret3"}
COMPOSE_FILES = {"cpu": ("compose.yaml",), "cuda": ("compose.yaml", "compose.cuda.yaml")}
KUSTOMIZATIONS = {"cpu": "overlays/cpu", "cuda": "base", "team": "overlays/team"}
_ASKED = re.compile(r"http://127\.0\.0\.1:(\d+)(/\w+)")
_REFERENCE = re.compile(r"\$\((\w+)\)")


@dataclass(frozen=True)
class Container:
    """
    Args:
        words: its arguments, with references to the environment resolved.
        entrypoint: what replaces the image's own; empty: nothing does.
        environment: None: taken from where compose runs, if it is there.
        writable: whether it may write, by the path where something is mounted.
        probes: port and path of each question about its health.
        referenced: variables that only its arguments refer to.
    """

    name: str
    image: str
    words: tuple[str, ...]
    entrypoint: tuple[str, ...]
    environment: Mapping[str, str | None]
    writable: Mapping[str, bool]
    probes: tuple[tuple[int, str], ...]
    referenced: frozenset[str] = frozenset()

    @property
    def is_ours(self) -> bool:
        return self.image.startswith("clawloop-")

    @property
    def is_engine(self) -> bool:
        return self.entrypoint[-3:] == ("python", "-m", "vllm.entrypoints.openai.api_server")

    def option(self, name: str) -> str:
        """The value of an option, given after a blank or an equals sign."""
        for word, following in zip(self.words, (*self.words[1:], ""), strict=True):
            if word == name:
                return following
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        raise AssertionError(f"{self.name} has no {name}")


def compose(device: str, env_file: Path, *profiles: str) -> subprocess.CompletedProcess[str]:
    """`docker compose config`, with no variable of ours around."""
    files = [word for name in COMPOSE_FILES[device] for word in ("--file", str(DEPLOY / name))]
    command = [str(BIN / "docker-compose"), *files, "--env-file", str(env_file)]
    command += [word for profile in ("admin", *profiles) for word in ("--profile", profile)]
    return subprocess.run(
        [*command, "config", "--format", "json"],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )


def filled_in(folder: Path, **values: str) -> Path:
    """compose.env.example as a person fills it in."""
    lines = (DEPLOY / "compose.env.example").read_text().splitlines()
    given = FILLED_IN | values
    lines = [line for line in lines if line.partition("=")[0] not in given]
    file = folder / "filled-in.env"
    file.write_text("\n".join([*lines, *(f"{name}={value}" for name, value in given.items())]))
    return file


@cache
def composed(device: str, folder: Path) -> dict[str, Any]:
    """All of compose's files for a device, merged; `folder` is for a file that it reads."""
    finished = compose(device, filled_in(folder))
    assert (finished.returncode, finished.stderr) == (0, "")
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


@cache
def kustomized(device: str) -> list[dict[str, Any]]:
    """All resources for a device, or for a team."""
    return built(DEPLOY / "kubernetes" / KUSTOMIZATIONS[device])


def built(folder: Path) -> list[dict[str, Any]]:
    """All resources of a kustomization."""
    command = [str(BIN / "kubectl"), "kustomize", str(folder)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")
    return list(yaml.safe_load_all(finished.stdout))


def of_compose(project: dict[str, Any]) -> list[Container]:
    return [
        Container(
            name=name,
            image=service["image"],
            words=tuple(service["command"] or ()) if "command" in service else (),
            entrypoint=tuple(service.get("entrypoint") or ()),
            environment=service.get("environment", {}),
            writable={mount["target"]: not mount.get("read_only", False) for mount in service.get("volumes", [])},
            probes=tuple(
                (int(port), path)
                for port, path in _ASKED.findall(" ".join(service.get("healthcheck", {}).get("test", ())))
            ),
        )
        for name, service in project["services"].items()
    ]


def of_kubernetes(resources: list[dict[str, Any]]) -> list[Container]:
    """Containers of all pods, those of the first replica."""
    known = {(resource["kind"], resource["metadata"]["name"]): resource for resource in resources}
    secret = next(yaml.safe_load_all((DEPLOY / "kubernetes" / "base" / "secret.example.yaml").read_text()))
    known["Secret", secret["metadata"]["name"]] = {"data": secret["stringData"]}
    found = []
    for resource in resources:
        if resource["kind"] not in ("Deployment", "StatefulSet", "Job"):
            continue
        pod = resource["spec"]["template"]["spec"]
        for container in pod["containers"]:
            environment = {"POD_NAME": f"{resource['metadata']['name']}-0"} if resource["kind"] == "StatefulSet" else {}
            for source in container.get("envFrom", []):
                [(kind, reference)] = source.items()
                named = ({"configMapRef": "ConfigMap", "secretRef": "Secret"}[kind], reference["name"])
                environment |= known[named]["data"]
            environment |= {pair["name"]: pair["value"] for pair in container.get("env", []) if "value" in pair}
            found.append(_of_pod(container, environment))
    return found


def _of_pod(container: dict[str, Any], environment: dict[str, str]) -> Container:
    ports = {port["name"]: int(port["containerPort"]) for port in container.get("ports", [])}
    probes: list[tuple[int, str]] = []
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container.get(kind, {})
        if "httpGet" in probe:
            probes.append((ports[probe["httpGet"]["port"]], probe["httpGet"]["path"]))
    words = container.get("args", [])
    return Container(
        name=container["name"],
        image=container["image"],
        words=tuple(_REFERENCE.sub(lambda found: environment[found[1]], word) for word in words),
        entrypoint=tuple(container.get("command", ())),
        environment=environment,
        writable={mount["mountPath"]: not mount.get("readOnly", False) for mount in container.get("volumeMounts", [])},
        probes=tuple(probes),
        referenced=frozenset(name for word in words for name in _REFERENCE.findall(word)),
    )
