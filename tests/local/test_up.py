"""`clawloop up`: its parts, and the files by which others find them."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import IO, Any
from uuid import UUID

import psutil
import psycopg
import pytest

from clawloop.app.layout.memory import Layout
from clawloop.app.layout.model_folder import ModelShape, read_model_shape
from clawloop.app.layout.plan import plan
from clawloop.app.layout.request import Gpus, Request, TrainingNeeds, limits_for
from clawloop.app.local.services.postgres import running_postgres
from clawloop.app.local.services.vllm import (
    GUARD_SECRET,
    LORA_TARGETS,
    EngineOptions,
    ModelFacts,
    launch,
    max_num_seqs,
    progress,
    read_model,
)
from clawloop.app.local.supervision.supervisor import Launch, Part
from clawloop.app.local.tiny_model import ensure_tiny_model
from clawloop.app.local.up import write_targets
from clawloop.app.processes.endpoints import RuntimeAddresses, installation_id, read_runtime_file, write_runtime_file
from clawloop.core.errors import SetupError
from clawloop.core.families.chat_format import ChatFormat
from clawloop.core.families.template import Thinking
from db.schema import migrate
from tests.conftest import execute
from tests.fakes.model_server import model_server
from tests.local import fake_gpus
from tests.processes import alive, by_name
from tests.unit.layout import shapes
from tests.unit.layout.folders import write_folder
from tests.unit.layout.shapes import request
from tests.verbs import refusal

# `clawloop up` on real PostgreSQL and Temporal, with a stand-in gateway and an external engine.

PROGRAM = str(Path(__file__).with_name("up_with_stand_ins.py"))
FREE_PORTS = [f"--{part}port=0" for part in ("", "temporal-", "temporal-ui-", "engine-")]


class Running:
    """A `clawloop up` process and its output so far."""

    def __init__(self, data: Path, *options: str, program: str = PROGRAM, **environment: str) -> None:
        if not any(option.startswith("--model") for option in options) and "CLAWLOOP_ENGINES" not in environment:
            options = (*options, "--model", str(ensure_tiny_model(data.parent / "models")))
        command = [sys.executable, program, "up", "--data", str(data), *FREE_PORTS, *options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ) | environment
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def line(self, pattern: str, seconds: float = 120) -> re.Match[str]:
        """The first line that matches; waits for it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None and not self._reader.is_alive()
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            if ended:
                break
            time.sleep(0.05)
        raise AssertionError(f"no line like {pattern!r} in\n" + "\n".join(self.lines))

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def ended(self, seconds: float = 60) -> int:
        code = self.process.wait(seconds)
        self._reader.join()
        return code


def open_to_others(data: Path) -> list[Path]:
    """The data folder, and the files and folders in it, that another user may open."""
    return [path for path in (data, *data.rglob("*")) if path.lstat().st_mode & 0o077 and not path.is_symlink()]


@contextmanager
def up(data: Path, *options: str, program: str = PROGRAM, **environment: str) -> Iterator[Running]:
    running = Running(data, *options, program=program, **environment)
    try:
        yield running
    finally:
        running.process.kill()
        running.ended()
        assert running.process.stdout is not None
        running.process.stdout.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """Answers `/v1/models` as vLLM does."""
    with model_server("Qwen3-4B") as url:
        yield url


def test_it_starts_everything_restarts_killed_parts_and_stops(tmp_path: Path, engine: str) -> None:
    with up(tmp_path / "data", CLAWLOOP_ENGINES=engine) as running:
        gateway = running.line(r"gateway +(http://127\.0\.0\.1:\d+)/v1$").group(1)
        assert running.line(r"page +(http://\S+)/ui$").group(1) == gateway
        ui = running.line(r"Temporal UI +(http://\S+)").group(1)
        running.line("every user of this machine can read and change it$")
        running.line("chat key +ck-1$")
        running.line("admin key +ak-1$")
        running.line("start 1 of Qwen3-4B as ")
        running.line("temporal starting: opening its database, usually 1 s")
        running.line("temporal ready")
        running.line(f"ready: {gateway}/v1 answers chats")
        assert urllib.request.urlopen(gateway).read().decode() == engine
        assert urllib.request.urlopen(ui).status == 200
        for name in ("temporal", "postgres"):
            by_name(running.descendants())[name].kill()
        for name in ("temporal", "postgres"):
            running.line(rf"{name} waiting: was ended by SIGKILL.*; restart in 0\.5 s")
            running.line(rf"{name} ready at .* \(restarts: 1\)")
        descendants = running.descendants()
        assert {"temporal", "postgres"} <= by_name(descendants).keys()
        running.process.send_signal(signal.SIGINT)
        assert running.ended() == 0
        assert alive(descendants) == []
        running.line("stopping gateway-0, gateway-1; then temporal; then postgres$")
        ends = [line.split()[1] for line in running.lines if line.endswith(" stopped")]
        assert (sorted(ends[:2]), ends[2:]) == (["gateway-0", "gateway-1"], ["temporal", "postgres"])
        assert running.lines[-1].partition(" ")[2] == f"stopped; the data stays in {tmp_path / 'data'}"


def test_data_and_keys_are_kept_for_the_owner_alone_and_a_second_up_is_rejected(tmp_path: Path, engine: str) -> None:
    data = tmp_path / "data"
    with up(data, CLAWLOOP_ENGINES=engine) as running:
        running.line("Ctrl-C stops everything")
        assert open_to_others(data) == []
        with up(data, CLAWLOOP_ENGINES=engine) as second:
            assert second.ended() == 1
            assert second.lines[-1] == (
                f"clawloop: clawloop up already runs on {data} (process {running.process.pid}):"
                " stop it first, or choose another folder: --data"
            )
        running.process.terminate()
        assert running.ended() == 0
    for path in (data, data / "logs", data / "temporal"):
        path.chmod(0o755)
    (data / "temporal" / "temporal.db").chmod(0o644)
    with up(data, "--alias", "small", "--alias", "smaller", CLAWLOOP_ENGINES=engine) as running:
        running.line(r"is for its owner alone now: 4 files and folders were open to others")
        running.line("Ctrl-C stops everything")
        running.line(r"start 2 of Qwen3-4B as \('small', 'smaller'\)")
        assert open_to_others(data) == []
        assert not any("ck-1" in line for line in running.lines)
        assert json.loads((data / "keys.json").read_text()) == {"chat": "ck-1", "admin": "ak-1"}
        watched = json.loads((data / "metric-targets.json").read_text())
        assert [one["labels"]["process"] for one in watched] == ["gateway"]  # no worker runs here
        assert all(re.fullmatch(r"127\.0\.0\.1:\d+", one["targets"][0]) for one in watched)
        running.process.terminate()
        assert running.ended() == 0


def test_a_folder_of_another_version_is_refused_in_one_line_and_left_as_it_is(tmp_path: Path, engine: str) -> None:
    with running_postgres(tmp_path / "postgres") as server:
        migrate(server.url)
        execute(server.url, "UPDATE alembic_version SET version_num = '0029'")
    done = subprocess.run(
        [sys.executable, "-m", "clawloop.app.cli.main", "up", "--data", str(tmp_path), *FREE_PORTS],
        env=dict(os.environ) | {"CLAWLOOP_ENGINES": engine},
        capture_output=True,
        text=True,
        timeout=300,
    )
    said = refusal(done)
    assert "another version of Clawloop made this database's schema (revision 0029)" in said
    assert "start this one with a new data folder (--data)" in said
    with running_postgres(tmp_path / "postgres") as server, psycopg.connect(server.url) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("0029",)]


def test_after_kill_9_no_process_is_left_and_it_starts_again(tmp_path: Path, engine: str) -> None:
    with up(tmp_path / "data", CLAWLOOP_ENGINES=engine) as running:
        running.line("Ctrl-C stops everything")
        running.line("temporal ready")
        descendants = running.descendants()
        running.process.kill()
        deadline = time.monotonic() + 30
        while alive(descendants) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert alive(descendants) == []
    with up(tmp_path / "data", CLAWLOOP_ENGINES=engine) as running:
        running.line("start 2 of Qwen3-4B")
        running.line("Ctrl-C stops everything")


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        (
            ["--model", "/no/such/model"],
            {},
            "there is no model folder /no/such/model: give one in Hugging Face's layout, ",
        ),
        (["--host", "192.0.2.9", "--port", "30000"], {}, "cannot listen on 192.0.2.9:30000 for the gateway"),
        ([], {"DATABASE_URL": "postgresql://me@127.0.0.1:1/x"}, "DATABASE_URL: connection failed"),
        ([], {"TEMPORAL_ADDRESS": "127.0.0.1:1"}, "TEMPORAL_ADDRESS: no Temporal"),
        ([], {"CLAWLOOP_ENGINES": "http://127.0.0.1:1"}, "engine http://127.0.0.1:1: Cannot connect"),
        (
            ["--judge-gpus=1"],
            {"CLAWLOOP_ENGINES": "http://127.0.0.1:1"},
            "--judge-gpus: CLAWLOOP_ENGINES names engines of your own",
        ),
    ],
)
def test_an_invalid_option_or_setting_is_one_line_and_exit_code_1(
    tmp_path: Path, options: list[str], environment: dict[str, str], expected: str
) -> None:
    with up(tmp_path / "data", *options, **environment) as running:
        assert running.ended() == 1
        assert [line for line in running.lines if line.startswith("clawloop: ")] == [running.lines[-1]]
        assert running.lines[-1].startswith(f"clawloop: {expected}")


# The file by which Prometheus finds the processes of a data folder.


async def ready() -> bool:
    return True


def part(name: str, port: int) -> Part:
    return Part(
        name=name,
        address=f"http://127.0.0.1:{port}",
        prepare=lambda: Launch((sys.executable,), {}),
        is_ready=ready,
        stop_within=timedelta(seconds=1),
        start_within=timedelta(seconds=1),
    )


def test_a_start_replaces_the_file_and_later_parts_are_added(tmp_path: Path) -> None:
    (tmp_path / "metric-targets.json").write_text("of an earlier start")
    write_targets(tmp_path, [part("gateway", 1), part("judge", 2)])
    write_targets(tmp_path, [part("trainer", 3)], further=True)
    write_targets(tmp_path, [replace(part("combined-worker", 4), roles=("orchestrator", "judge"))], further=True)
    assert json.loads((tmp_path / "metric-targets.json").read_text()) == [
        {"targets": ["127.0.0.1:1"], "labels": {"process": "gateway"}},
        {"targets": ["127.0.0.1:2"], "labels": {"process": "judge"}},
        {"targets": ["127.0.0.1:3"], "labels": {"process": "trainer"}},
        # Each role as if it had a process of its own; Prometheus takes the path from this label.
        {
            "targets": ["127.0.0.1:4"],
            "labels": {"process": "orchestrator", "__metrics_path__": "/metrics/orchestrator"},
        },
        {"targets": ["127.0.0.1:4"], "labels": {"process": "judge", "__metrics_path__": "/metrics/judge"}},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metric-targets.json"]


# The files in a data folder by which other commands find the last `clawloop up`.


def test_addresses_are_read_back_and_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    assert read_runtime_file(tmp_path) is None
    own = RuntimeAddresses("postgresql://me:secret@here/x", "here:7233", None, "http://here:4000", None)
    write_runtime_file(tmp_path, own)
    assert read_runtime_file(tmp_path) == own
    whole = RuntimeAddresses("postgresql://here/x", "here:7233", "http://ui", "http://here:4000", 4096)
    write_runtime_file(tmp_path, whole)
    assert read_runtime_file(tmp_path) == whole
    assert stat.S_IMODE((tmp_path / "running.json").stat().st_mode) == 0o600


_WITHOUT_GATEWAY = b'{"database_url": "secr", "temporal_address": "x", "temporal_ui": null, "context_tokens": null}'


@pytest.mark.parametrize(
    "content", [b"", b'{"database_url": "secr', b"[]", b"7", b'{"secret": 1}', _WITHOUT_GATEWAY, b"\xff"]
)
def test_a_damaged_file_is_reported_in_one_line_without_its_content(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "running.json"
    path.write_bytes(content)
    with pytest.raises(SetupError, match=f"{path} is damaged") as raised:
        read_runtime_file(tmp_path)
    assert "\n" not in str(raised.value)
    assert "secr" not in str(raised.value)


def test_a_data_folder_keeps_its_installation_id(tmp_path: Path) -> None:
    first = installation_id(tmp_path / "one")
    assert installation_id(tmp_path / "one") == first
    assert installation_id(tmp_path / "two") != first


def test_an_installation_id_that_could_not_be_written_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "installation").touch()
    made = installation_id(tmp_path)
    assert str(UUID(made)) == made
    opened = Path.open

    def open_to_read(path: Path, mode: str = "r", **options: Any) -> IO[Any]:
        if "a" in mode:
            raise PermissionError(13, "Permission denied")
        return opened(path, mode, **options)

    monkeypatch.setattr(Path, "open", open_to_read)
    assert installation_id(tmp_path) == made  # which needs no right to write


def test_gateways_that_begin_together_have_one_installation_id(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(installation_id, [tmp_path] * 64))) == 1


# `clawloop up` on a machine with GPUs, with stand-ins for nvidia-smi, vLLM and the workers.

PROGRAM_ON_GPUS = str(Path(__file__).with_name("up_with_noted_workers.py"))
GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(tmp_path_factory.mktemp("models"))


def planned(model: Path, gpus: Gpus) -> Layout:
    """What `clawloop plan` says."""
    shape = read_model_shape(model)
    needs = TrainingNeeds()
    return plan(
        Request(
            model=shape,
            limits=limits_for(shape, needs, max_lora_rank=16),
            gpus=gpus,
            memory=0,
            training=needs,
            dtype="bfloat16",
        )
    )


def flags_in(arguments: list[str]) -> str:
    return " ".join(arguments)


def test_one_gpu_is_shared_as_planned_and_the_engine_comes_first(tmp_path: Path, model: Path) -> None:
    fakes = fake_gpus.install(tmp_path / "gpus", 80, starts_after=1)
    with up(tmp_path / "data", "--device=cuda", f"--model={model}", program=PROGRAM_ON_GPUS, **fakes) as running:
        running.line(r"GPU 0 +80\.0 .* engine 0, trainer$")
        running.line("trainer: .* GiB, on the engine's GPU: it is the only one$")
        running.line("vllm ready at .*tiny-random on GPU 0")
        running.line("trainer ready")
        noted, lines = fake_gpus.notes(fakes), list(running.lines)
    layout = planned(model, Gpus(sizes=(80 * GIB,)))
    engine, trainer = layout.processes
    [vllm] = [note for name, note in noted.items() if name.startswith("vllm")]
    assert flags_in(list(engine.arguments)) in flags_in(vllm["arguments"])
    assert "--kv-cache-memory-bytes" in vllm["arguments"]
    assert flags_in(list(trainer.arguments)) in flags_in(noted["trainer"]["arguments"])
    for process, note in ((engine, vllm), (trainer, noted["trainer"])):
        assert process.environment.items() <= note["environment"].items()
    # A dated line for every change of a part.
    states = [line.split(maxsplit=1)[1] for line in lines]
    engine_ready = next(number for number, state in enumerate(states) if state.startswith("vllm ready"))
    trainer_starting = next(number for number, state in enumerate(states) if state.startswith("trainer starting"))
    assert trainer_starting > engine_ready


def test_engines_judge_and_trainer_are_on_gpus_of_their_own(tmp_path: Path, model: Path) -> None:
    fakes = fake_gpus.install(tmp_path / "gpus", 24, *[80] * 6)
    sets = ("--serve-gpus=0,1", "--judge-gpus=2", "--train-gpus=3,4", f"--judge-model={model}")
    further = ("--engine-arg=--enforce-eager", "--engine-arg", "--seed 7")
    visible = {"CUDA_VISIBLE_DEVICES": "6,5,4,3,2"}
    options = ("--device=cuda", f"--model={model}", *sets, *further)
    with up(tmp_path / "data", *options, program=PROGRAM_ON_GPUS, **fakes, **visible) as running:
        for part in ("vllm-0", "vllm-1", "vllm-judge", "engine-agent-0", "engine-agent-1", "trainer"):
            running.line(f"{part} ready")
        noted = fake_gpus.notes(fakes)
        running.process.terminate()
        assert running.ended(30) == 0
        stopped = [line.split()[1] for line in running.lines if line.endswith(" stopped")]
    assert stopped[-1] == "postgres"
    assert set(stopped[-5:-1]) == {"vllm-0", "vllm-1", "vllm-judge", "temporal"}
    engines = {note["environment"]["CUDA_VISIBLE_DEVICES"]: note for name, note in noted.items() if "vllm" in name}
    assert engines.keys() == {"6", "5", "4"}
    assert noted["trainer"]["environment"]["CUDA_VISIBLE_DEVICES"] == "3,2"
    assert flags_in(noted["trainer"]["arguments"]).count("--nproc 2 --ranks replicated") == 1
    assert all(note["arguments"][-3:] == ["--enforce-eager", "--seed", "7"] for note in engines.values())
    assert ["--enable-lora" in engines[gpu]["arguments"] for gpu in ("6", "5", "4")] == [True, True, False]
    # Each agent has an engine, and the judge asks the third.
    ports = {gpu: note["arguments"][note["arguments"].index("--port") + 1] for gpu, note in engines.items()}
    served = {f"http://127.0.0.1:{ports[gpu]}" for gpu in ("6", "5")}
    assert {noted[f"engine-agent-{n}"]["arguments"][2] for n in (0, 1)} == served
    judging = noted["judge"]["environment"]
    assert judging["CLAWLOOP_JUDGE_URL"] == f"http://127.0.0.1:{ports['4']}"
    assert (judging["CLAWLOOP_JUDGE_MODEL"], judging["CLAWLOOP_JUDGE_FORM"]) == ("tiny-random", "auto")
    assert "CLAWLOOP_JUDGE_URL" not in noted["orchestrator"]["environment"]


def refused(data: Path, *options: str, **environment: str) -> str:
    with up(data, "--device=cuda", *options, program=PROGRAM_ON_GPUS, **environment) as running:
        assert running.ended() == 1
        [line] = [line for line in running.lines if line.startswith("clawloop: ")]
        return line


def test_a_gpu_that_is_too_small_is_refused_with_the_words_of_the_plan(tmp_path: Path, model: Path) -> None:
    fakes = fake_gpus.install(tmp_path / "gpus", 2)
    said = refused(tmp_path / "data", f"--model={model}", **fakes)
    assert said.startswith("clawloop: tiny-random does not fit: GPU 0 has 1.9 GiB to use, engine 0 and trainer need")
    assert said.endswith(": 2 GPUs (--gpus 2,2), or a GPU of 3 GiB")


def test_float32_is_refused_before_anything_starts(tmp_path: Path, model: Path) -> None:
    fakes = fake_gpus.install(tmp_path / "gpus", 80)
    said = refused(tmp_path / "data", f"--model={model}", "--dtype=float32", **fakes)
    assert said.startswith(
        "clawloop: --dtype float32: vLLM's LoRA kernels on CUDA compute in 16 bits alone: use bfloat16"
    )


# vLLM's command line and environment, by model, machine and options.

CHAT = ChatFormat(Thinking.OPTIONAL, "hermes", "qwen3")
SHAPE = replace(shapes.QWEN3_4B, chat=CHAT)
PLANNED = plan(request(SHAPE, (80,))).processes[0].arguments
QWEN3_4B = ModelFacts(path=Path("/models/Qwen3-4B"), name="Qwen3-4B", chat=CHAT)
OPTIONS = EngineOptions(port=8100, planned=PLANNED)


def flags(command: tuple[str, ...]) -> dict[str, list[str]]:
    """Values by flag."""
    by_flag: dict[str, list[str]] = {}
    values: list[str] = []
    for word in command:
        if word.startswith("--"):
            values = by_flag.setdefault(word, [])
        else:
            values.append(word)
    return by_flag


def test_flags_of_every_engine() -> None:
    command = launch(QWEN3_4B, OPTIONS, {}).command
    assert command[:3] == (sys.executable, "-m", "clawloop.serving.engine_log")
    assert command[3:6] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    given = flags(command)
    assert given["--lora-target-modules"] == list(LORA_TARGETS)
    assert given["--scheduling-policy"] == ["priority"]
    assert given["--served-model-name"] == ["Qwen3-4B"]
    assert given["--host"] == ["127.0.0.1"]
    assert given["--generation-config"] == ["vllm"]
    assert given["--logprobs-mode"] == ["processed_logprobs"]
    assert "--enable-auto-tool-choice" in given
    planned = flags(PLANNED)
    assert {flag: given[flag] for flag in planned} == planned


def test_an_engine_without_adapters_has_no_targets_for_them() -> None:
    judge = plan(request(shapes.QWEN3_4B, (80, 80, 80), judge=(2,))).processes[1]
    command = launch(QWEN3_4B, EngineOptions(8100, judge.arguments), {}).command
    assert not {"--lora-target-modules", "--scheduling-policy"} & set(command)


def test_an_engine_with_a_secret_is_guarded_and_the_secret_is_not_on_its_command_line() -> None:
    guarded = launch(QWEN3_4B, replace(OPTIONS, environment={GUARD_SECRET: "s3cret"}), {})
    assert flags(guarded.command)["--middleware"] == ["clawloop.serving.engine_guard.EngineGuard"]
    assert guarded.environment[GUARD_SECRET] == "s3cret"
    assert not any("s3cret" in word for word in guarded.command)
    assert "--middleware" not in flags(launch(QWEN3_4B, OPTIONS, {}).command)


def test_a_persons_arguments_come_last_and_win() -> None:
    further = ("--max-num-seqs=8", "--enforce-eager")
    assert launch(QWEN3_4B, replace(OPTIONS, further=further), {}).command[-2:] == further
    assert max_num_seqs(replace(OPTIONS, further=further)) == 8
    assert max_num_seqs(replace(OPTIONS, further=("--max-num-seqs", "9"))) == 9
    assert max_num_seqs(replace(OPTIONS, further=("--max-num-seqs", "9", "--max_num_seqs=10"))) == 10
    assert max_num_seqs(replace(OPTIONS, further=("--max_num_seqs", "11", "--override=--max-num-seqs"))) == 11
    with pytest.raises(SetupError, match="--max-num-seqs of an engine is no number: 'many'"):
        max_num_seqs(replace(OPTIONS, further=("--max-num-seqs", "many")))
    assert str(max_num_seqs(OPTIONS)) == flags(PLANNED)["--max-num-seqs"][0]


def test_without_guard_sampling_generation_config_is_not_overridden() -> None:
    careless = launch(QWEN3_4B, replace(OPTIONS, guard_sampling=False), {})
    assert "--generation-config" not in flags(careless.command)


def parsers_of(model: ModelShape) -> dict[str, list[str]]:
    planned = plan(request(model, (80,))).processes[0].arguments
    given = flags(launch(QWEN3_4B, replace(OPTIONS, planned=planned), {}).command)
    return {flag: values for flag, values in given.items() if "parser" in flag or "tool-choice" in flag}


def test_the_parsers_are_those_of_the_family() -> None:
    assert parsers_of(SHAPE) == {
        "--reasoning-parser": ["qwen3"],
        "--tool-call-parser": ["hermes"],
        "--enable-auto-tool-choice": [],
    }
    assert parsers_of(replace(SHAPE, chat=ChatFormat(Thinking.NEVER, None, None))) == {}


def test_variables_are_those_of_the_layout_over_those_inherited() -> None:
    options = replace(OPTIONS, environment={"CUDA_VISIBLE_DEVICES": "1"})
    given = launch(QWEN3_4B, options, {"CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "1"}).environment
    assert given["CUDA_VISIBLE_DEVICES"] == "1"
    assert given["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_the_engine_makes_no_outgoing_requests() -> None:
    environment = launch(QWEN3_4B, OPTIONS, {"PATH": "/bin"}).environment
    assert environment["PATH"] == "/bin"
    assert {name: environment[name] for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")} == {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    assert "VLLM_SERVER_DEV_MODE" not in environment  # it would open /pause and /collective_rpc


def test_a_grammar_has_time_to_compile_on_a_busy_cpu() -> None:
    limit = "VLLM_REGEX_COMPILATION_TIMEOUT_S"
    assert int(launch(QWEN3_4B, OPTIONS, {}).environment[limit]) >= 10 * 5  # ten times vLLM's
    assert launch(QWEN3_4B, OPTIONS, {limit: "7"}).environment[limit] == "7"


def test_properties_are_read_from_the_model_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "Qwen3-4B")
    template = "<tool_call>{% if enable_thinking is false %}<think></think>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    assert read_model(folder) == replace(QWEN3_4B, path=folder)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("(Worker pid=1) INFO [m.py:68] Starting to load model /m...", "usually 30 s to 3 minutes: loading weights"),
        (
            "(EngineCore pid=1) INFO [k.py:1] CPU KV cache size: 524,288 tokens, Maximum",
            "usually 30 s to 3 minutes: cache for 524,288 tokens",
        ),
        ("INFO something else", None),
    ],
)
def test_progress_is_read_from_log_lines(line: str, expected: str | None) -> None:
    assert progress(line) == expected


def test_what_the_engines_processes_tell_each_other_stays_on_the_machine() -> None:
    environment = launch(QWEN3_4B, OPTIONS, {}).environment
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "lo"
    given = {"GLOO_SOCKET_IFNAME": "eth1"}
    assert launch(QWEN3_4B, OPTIONS, given).environment["GLOO_SOCKET_IFNAME"] == "eth1"
