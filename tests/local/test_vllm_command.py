"""vLLM's command line and environment, by model, machine and options."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from clawloop.families.chat_format import ChatFormat
from clawloop.families.thinking import Thinking
from clawloop.local.services.vllm import LORA_TARGETS, Device, EngineOptions, ModelFacts, launch, progress, read_model

QWEN3_4B = ModelFacts(
    path=Path("/models/Qwen3-4B"),
    name="Qwen3-4B",
    context_tokens=40960,
    cache_bytes_per_token=2 * 36 * 8 * 128 * 2,
    dtype="bfloat16",
    chat=ChatFormat(Thinking.OPTIONAL, "hermes", "qwen3"),
)
OPTIONS = EngineOptions(port=8100)


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
    command = launch(QWEN3_4B, OPTIONS, Device.CUDA, {}).command
    assert command[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    given = flags(command)
    assert given["--lora-target-modules"] == list(LORA_TARGETS)
    assert given["--served-model-name"] == ["Qwen3-4B"]
    assert given["--host"] == ["127.0.0.1"]
    assert given["--generation-config"] == ["vllm"]
    assert given["--logprobs-mode"] == ["processed_logprobs"]
    assert given["--max-model-len"] == ["32768"]
    assert given["--dtype"] == ["bfloat16"]
    assert {"--enable-lora", "--enable-auto-tool-choice"} <= given.keys()


@pytest.mark.parametrize("rank", [16, 64])
def test_max_lora_rank_is_passed_on(rank: int) -> None:
    given = flags(launch(QWEN3_4B, replace(OPTIONS, max_lora_rank=rank), Device.CUDA, {}).command)
    assert given["--max-lora-rank"] == [str(rank)]


def test_without_guard_sampling_generation_config_is_not_overridden() -> None:
    careless = launch(QWEN3_4B, replace(OPTIONS, guard_sampling=False), Device.CPU, {})
    assert "--generation-config" not in flags(careless.command)


@pytest.mark.parametrize(("device", "whole"), [(Device.CPU, True), (Device.CUDA, False)])
def test_chunked_prefill_is_off_on_a_cpu(device: Device, whole: bool) -> None:
    given = flags(launch(QWEN3_4B, replace(OPTIONS, max_model_len=5000), device, {}).command)
    assert ("--no-enable-chunked-prefill" in given) == whole
    assert given.get("--max-num-batched-tokens") == (["5000"] if whole else None)


def test_the_parsers_are_those_of_the_family() -> None:
    given = flags(launch(QWEN3_4B, OPTIONS, Device.CUDA, {}).command)
    assert given["--reasoning-parser"] == ["qwen3"]
    assert given["--tool-call-parser"] == ["hermes"]
    plain = ChatFormat(Thinking.NEVER, None, None)
    given = flags(launch(replace(QWEN3_4B, chat=plain), OPTIONS, Device.CUDA, {}).command)
    assert not {"--reasoning-parser", "--tool-call-parser", "--enable-auto-tool-choice"} & given.keys()


@pytest.mark.parametrize(
    ("own", "option", "expected"),
    [
        ("float32", None, "float32"),
        ("bfloat16", None, "bfloat16"),
        ("float16", None, "bfloat16"),
        (None, None, "bfloat16"),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_dtype_is_the_option_or_the_models_own(own: str | None, option: str | None, expected: str) -> None:
    given = flags(launch(replace(QWEN3_4B, dtype=own), replace(OPTIONS, dtype=option), Device.CPU, {}).command)
    assert given["--dtype"] == [expected]


def test_the_cache_of_a_cpu_engine_holds_two_full_contexts() -> None:
    # 32768 tokens of 144 KiB are 4.5 GiB.
    assert launch(QWEN3_4B, OPTIONS, Device.CPU, {}).environment["VLLM_CPU_KVCACHE_SPACE"] == "9"
    assert "VLLM_CPU_KVCACHE_SPACE" not in launch(QWEN3_4B, OPTIONS, Device.CUDA, {}).environment
    given = launch(QWEN3_4B, OPTIONS, Device.CPU, {"VLLM_CPU_KVCACHE_SPACE": "3"}).environment
    assert given["VLLM_CPU_KVCACHE_SPACE"] == "3"


def test_the_engine_makes_no_outgoing_requests() -> None:
    environment = launch(QWEN3_4B, OPTIONS, Device.CUDA, {"PATH": "/bin"}).environment
    assert environment["PATH"] == "/bin"
    assert {name: environment[name] for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")} == {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    assert "VLLM_SERVER_DEV_MODE" not in environment  # it would open /pause and /collective_rpc


def test_properties_are_read_from_the_model_folder(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-4B"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 36, "hidden_size": 2560,'
        ' "head_dim": 128, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}'
    )
    template = "<tool_call>{% if enable_thinking is false %}<think></think>{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
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
