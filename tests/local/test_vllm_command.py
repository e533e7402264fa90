"""vLLM's command line and environment, by model, machine and options."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from clawloop.app.layout.model_folder import ModelShape
from clawloop.app.layout.plan import plan
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
from clawloop.core.errors import SetupError
from clawloop.core.families.chat_format import ChatFormat
from clawloop.core.families.template import Thinking
from tests.unit.layout import shapes
from tests.unit.layout.folders import write_folder
from tests.unit.layout.shapes import request

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


def test_properties_are_read_from_the_model_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "Qwen3-4B")
    template = "<tool_call>{% if enable_thinking is false %}<think></think>{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    assert read_model(folder) == replace(QWEN3_4B, path=folder)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("(Worker pid=1) INFO [m.py:68] Starting to load model /m...", "loading weights"),
        ("(EngineCore pid=1) INFO [k.py:1] CPU KV cache size: 524,288 tokens, Maximum", "cache for 524,288 tokens"),
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
