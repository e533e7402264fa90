"""`clawloop adapter merge`: prints the report, or one line with the reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from clawloop.app.cli.main import app, run_verb
from tests.training.test_merge import base_and_adapter
from tests.training.tiny import random_ids, reference_model, save_checkpoint


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return base_and_adapter(tmp_path_factory.mktemp("merge"), "qwen3", tied=True, shard_size="1GB")


def arguments(base: Path, adapter: Path, out: Path, *more: str) -> list[str]:
    return ["adapter", "merge", "--base", str(base), "--adapter", str(adapter), "--out", str(out), *more]


def reason(called: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What `clawloop` prints on standard error when it ends with code 1."""
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["clawloop", *called])
    with pytest.raises(SystemExit) as ended:
        run_verb()
    assert ended.value.code == 1
    return capsys.readouterr().err


def test_the_command_writes_a_checkpoint_and_prints_the_report(parts: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = parts
    out = tmp_path / "merged"
    result = CliRunner().invoke(app, arguments(base, adapter, out))
    assert result.exit_code == 0, result.output
    assert str(out) in result.output
    assert result.output.count("%") == 2
    ids = random_ids(20)
    with torch.no_grad():
        merged, unmerged = (reference_model(path)(torch.tensor([ids])).logits[0] for path in (out, base))
    assert (merged - unmerged).norm() / unmerged.norm() > 0.1


def test_the_report_is_available_as_json(parts: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = parts
    result = CliRunner().invoke(app, arguments(base, adapter, tmp_path / "merged", "--json"))
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report.keys() == {"out", "logit_error", "logit_change"}
    assert report["out"] == str(tmp_path / "merged")
    assert report["logit_error"] < 0.03 < 0.3 < report["logit_change"]


def test_a_merge_that_fails_prints_one_line(
    parts: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base, adapter = parts
    other = save_checkpoint(tmp_path / "other", seed=1)
    (tmp_path / "file").touch()
    reasons = {
        "exists; give a directory": arguments(base, adapter, base),
        "another tiny": arguments(other, adapter, tmp_path / "a"),
        "no readable config.json": arguments(tmp_path / "nothing", adapter, tmp_path / "b"),
        "adapter_config.json cannot be read": arguments(base, base, tmp_path / "c"),
        "cannot be written": arguments(base, adapter, tmp_path / "file" / "d"),
    }
    messages = {expected: reason(called, monkeypatch, capsys) for expected, called in reasons.items()}
    for expected, message in messages.items():
        assert expected in message
        assert message.startswith("clawloop: ")
        assert message.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]
