"""`clawloop demo report`: what several demos found, as one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from clawloop.app.cli.demo import report_command
from clawloop.app.demo.report_formats import as_json
from tests.demo.test_report import report

app = typer.Typer()
app.command()(report_command)


@pytest.fixture
def parts(tmp_path: Path) -> list[str]:
    """Two reports of one run each."""
    runs = [replace(report(0.5, 0.95), seed=1), replace(report(0.4, 0.6), seed=2, method="binary")]
    paths = [tmp_path / f"part-{run.seed}.json" for run in runs]
    for path, run in zip(paths, runs, strict=True):
        path.write_text(as_json([run], 100.0))
    return [str(path) for path in paths]


def test_parts_are_joined_summed_and_drawn(tmp_path: Path, parts: list[str]) -> None:
    done = CliRunner().invoke(app, [*parts, "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0
    joined = json.loads(done.stdout)
    assert [(run["seed"], run["method"]) for run in joined["runs"]] == [(1, "opd"), (2, "binary")]
    assert (joined["summary"]["runs"], joined["summary"]["seconds"]) == (2, 200.0)
    assert list(joined["summary"]["methods"]) == ["opd", "binary"]
    assert done.stderr.splitlines()[-1].startswith("1 of 2 runs reached 90 %")
    assert json.loads((tmp_path / "demo-report.json").read_text()) == joined
    assert (tmp_path / "demo-report.png").read_bytes().startswith(b"\x89PNG")


def test_markdown_is_the_only_output_on_stdout(tmp_path: Path, parts: list[str]) -> None:
    done = CliRunner().invoke(app, [*parts, "--markdown"])
    assert done.stdout.startswith("| method | reached 90 % |")
    assert "| 2 | binary | 11 |" in done.stdout
    assert not (tmp_path / "demo-report.json").exists()


def test_duplicate_runs_and_missing_files_are_one_line(tmp_path: Path, parts: list[str]) -> None:
    done = CliRunner().invoke(app, [*parts, parts[0]])
    assert (done.exit_code, done.stderr) == (
        1,
        "clawloop: opd with seed 1 is in the reports twice: each run may occur only once\n",
    )
    done = CliRunner().invoke(app, [str(tmp_path / "none.json")])
    assert (done.exit_code, done.stderr) == (
        1,
        f"clawloop: {tmp_path}/none.json cannot be read: No such file or directory\n",
    )
