"""The file of encryption keys reaches every process of ours, in compose and Kubernetes, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import yaml

from tests.deploy.containers import BIN, DEPLOY, filled_in

SETTING = "CLAWLOOP_ENCRYPTION_KEY_FILE"
OURS = {"gateway", "orchestrator", "judge", "trainer", "migrate"}


def test_compose_gives_the_file_to_our_services(tmp_path: Path) -> None:
    files = [word for name in ("compose.yaml", "compose.encryption.yaml") for word in ("--file", str(DEPLOY / name))]
    environment = filled_in(tmp_path, ENCRYPTION_KEY_FILE="/etc/clawloop/keys")
    command = [str(BIN / "docker-compose"), *files, "--env-file", str(environment), "--profile", "admin"]
    finished = subprocess.run(
        [*command, "config", "--format", "json"],
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    project = json.loads(finished.stdout)
    given = {
        name
        for name, service in project["services"].items()
        if (service.get("environment") or {}).get(SETTING) == "/run/secrets/encryption-keys"
        and [secret["source"] for secret in service["secrets"]] == ["encryption-keys"]
    }
    assert given == OURS | {"engine-agent", "admin"}
    assert project["secrets"]["encryption-keys"]["file"] == "/etc/clawloop/keys"


def test_kubernetes_mounts_the_secret_where_the_setting_says(tmp_path: Path) -> None:
    kubernetes = DEPLOY / "kubernetes"
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(kubernetes / "base", tmp_path)],
        "components": [os.path.relpath(kubernetes / "components" / "encryption", tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    finished = subprocess.run(
        [str(BIN / "kubectl"), "kustomize", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    mounted = set()
    for resource in yaml.safe_load_all(finished.stdout):
        if resource["kind"] == "ConfigMap" and resource["metadata"]["name"].startswith("clawloop"):
            assert resource["data"][SETTING] == "/keys/keys"
        if resource["kind"] not in ("Deployment", "StatefulSet", "Job"):
            continue
        pod = resource["spec"]["template"]["spec"]
        secrets = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "encryption-keys"]
        assert secrets == [{"secretName": "clawloop-encryption", "defaultMode": 0o440}]
        mounted |= {
            f"{resource['metadata']['name']}/{place}"
            for place, container in enumerate(pod["containers"])
            if {"name": "encryption-keys", "mountPath": "/keys", "readOnly": True} in container["volumeMounts"]
        }
    assert mounted == {f"{name}/0" for name in OURS} | {"engine/1"}
