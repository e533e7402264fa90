"""Cost of a training step, compared with PEFT + transformers (Qwen3, Llama) and torchtune's LoRA recipe (Qwen2.5).

Also the cost by the samples of a batch, which should be linear, with and without sharing prefixes over the turns of one
session, the tokens saved by scoring hinted prompts together with the plain ones, and what hints cost.

Same weights, adapter, batch and arithmetic in one run; the run fails if the losses differ. Each contender is a
process of its own, so that peak memory is its own, and the contenders' steps alternate, so that a machine that
slows down slows all of them. On the CPU a process's memory also holds code, libraries and what the allocator keeps, so
the peak of the step's tensors is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TypedDict

import torch

from benchmarks.options import at_least, sizes
from benchmarks.report import Ratio, Result
from benchmarks.train_case import HINT_TOKENS, Case, Family, Ids, Shape, session_samples, unrelated_samples, write_case
from benchmarks.train_figures import Comparison, Cost, Found, hints_beside_none, result_of
from benchmarks.train_tokens import tokens_of_session
from clawloop.core.errors import SetupError
from clawloop.core.recipes.recipe import MOST_HINTS

OURS, OURS_APART, OURS_ALONE = "clawloop", "clawloop, not sharing", "clawloop, by transformers"
HINTED = tuple(f"clawloop, {hints} hints" for hints in range(MOST_HINTS + 1))
COMPARISONS = {
    "qwen3": Comparison("qwen3", "Qwen3 shape, nothing shared", (OURS, OURS_APART, "peft"), has_sizes=True),
    "qwen2": Comparison("qwen2", "Qwen2.5 shape, nothing shared", (OURS, "torchtune")),
    "session": Comparison("qwen3", "Qwen3 shape, turns of one session", (OURS, OURS_APART), is_session=True),
    "hints": Comparison("qwen3", "Qwen3 shape, by hints with a control", HINTED, by_hints=True),
    "smollm2": Comparison("llama", "SmolLM2-135M's shape, nothing shared", (OURS, OURS_ALONE, "peft")),
}
SMOLLM2_SHAPE = Shape(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
)
# Qwen3-4B, and Qwen2.5-3B: torchtune's builder cannot make heads whose sizes do not add up to the model's width.
GPU_SHAPES: dict[Family, Shape] = {
    "qwen3": Shape(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "qwen2": Shape(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
    ),
}
# Dense bfloat16, from the data sheets.
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312}
# The largest difference of losses; bfloat16 rounds each log-prob by up to some hundredths.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


class Took(TypedDict):
    """A contender's response to `step`."""

    loss: float
    peak_bytes: float
    wall_seconds: float
    cpu_seconds: float


class Profiled(TypedDict):
    """A contender's response to `profile`."""

    tensor_bytes: float
    table: str


class Contender:
    """One process and its responses; the model is loaded once `wait_until_loaded` returns."""

    def __init__(self, name: str, folder: Path, case: Case):
        self.name = name
        self.loaded_bytes = 0.0
        self.steps: list[Took] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.train_contenders", name, str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": str(case.threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_loaded(self) -> None:
        self.loaded_bytes = json.loads(self._answer())["loaded_bytes"]

    def take_step(self) -> None:
        took: Took = json.loads(self._ask("step"))
        self.steps.append(took)

    def profile(self) -> Profiled:
        profiled: Profiled = json.loads(self._ask("profile"))
        return profiled

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(20)

    def _ask(self, command: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return line
        raise RuntimeError(f"{self.name} ended with {self._process.wait(20)}; its output is above")


def _width(given: str) -> int:
    if int(given) % 128:
        raise argparse.ArgumentTypeError(f"{given} is no multiple of 128")
    return at_least(128)(given)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", action="store_true", help="Qwen3-4B and Qwen2.5-3B shapes in bfloat16, 2k tokens")
    parser.add_argument("--comparisons", nargs="+", choices=list(COMPARISONS), default=["qwen3", "qwen2", "session"])
    parser.add_argument("--samples", type=sizes, default=None, help="of a batch; default: 4,8,16; 2,4 with --quick")
    parser.add_argument("--turns", type=int, default=20, help="of the session")
    parser.add_argument("--tokens", type=int, help="of a sample, about; 128, with --gpu 2048")
    parser.add_argument("--samples-at-once", type=int, default=4, help="in a micro-batch")
    parser.add_argument("--repeats", type=at_least(1), default=2, help="steps that are timed")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before")
    parser.add_argument("--dtype", choices=list(TOLERANCE), help="float32, with --gpu bfloat16")
    parser.add_argument("--rank", type=int, default=16, help="of LoRA")
    parser.add_argument("--hidden", type=_width, default=256, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1, help="one thread's time says most on a busy machine")
    parser.add_argument("--peak-tflops", type=float, help="of this GPU in dense bfloat16; for MFU")
    parser.add_argument("--profile", action="store_true", help="also print where each contender's time goes")
    parser.add_argument("--folder", type=Path, help="for the checkpoints; the system's temporary one if not given")


def run(options: argparse.Namespace) -> Result:
    """
    Raises:
        SetupError: `--gpu` without CUDA.
    """
    if options.gpu and not torch.cuda.is_available():
        raise SetupError("--gpu: torch finds no CUDA device on this machine")
    options.tokens = options.tokens or (2048 if options.gpu else 128)
    options.dtype = options.dtype or ("bfloat16" if options.gpu else "float32")
    options.samples = options.samples or ([2, 4] if options.quick else [4, 8, 16])
    os.environ.update(TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1", TORCH_CPP_LOG_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    found = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name in options.comparisons:
            comparison = COMPARISONS[name]
            if comparison.is_session:
                batches = [session_samples(options.turns, options.tokens, options.vocab)]
            else:
                numbers = options.samples if comparison.has_sizes else options.samples[-1:]
                batches = [unrelated_samples(number, options.tokens, options.vocab) for number in numbers]
            for ids in batches:
                found.append(_compare(Path(folder) / f"{name}-{len(ids)}", comparison, ids, options))
                print(f"{time.strftime('%H:%M:%S')} {found[-1].name}", *found[-1].told, sep="\n  ", flush=True)
    return result_of(found, _peak_flops(options.peak_tflops) if options.gpu else None)


def _compare(path: Path, comparison: Comparison, ids: Sequence[Ids], options: argparse.Namespace) -> Found:
    case = _case(comparison, ids, options)
    # A separate process, which releases the GPU's memory and does not raise this process's peak.
    writer = get_context("spawn").Process(target=write_case, args=(path, case, ids))
    writer.start()
    writer.join()
    if writer.exitcode != 0:
        raise RuntimeError(f"the case could not be made: exit code {writer.exitcode}")
    costs, off, raw = _measure(path, comparison, case, options)
    tokens = sum(_lengths(ids))
    told, ratios = _tokens(ids, case, tokens, options) if comparison.is_session else ([], {})
    if comparison.by_hints:
        told, ratios = hints_beside_none(costs)
    else:
        told = [*told, f"losses differ by {off:.1e}"]
    flops = None if comparison.is_session or comparison.by_hints else _flops(case.shape, ids)
    return Found(comparison, len(ids), tokens, costs, off, raw, flops, told, ratios)


def _measure(
    path: Path, comparison: Comparison, case: Case, options: argparse.Namespace
) -> tuple[list[Cost], float, dict[str, list[float]]]:
    """Return the cost of each contender's step, the largest difference of their losses, and seconds of single steps."""
    with ExitStack() as stack:
        contenders = [Contender(name, path, case) for name in comparison.contenders]
        for contender in contenders:
            stack.callback(contender.end)
        for contender in contenders:
            contender.wait_until_loaded()
        for number in range(options.warm_up + options.repeats):
            for contender in contenders if number % 2 == 0 else reversed(contenders):
                contender.take_step()
        off = 0.0 if comparison.by_hints else _largest_loss_difference(contenders)
        if not off <= TOLERANCE[case.dtype]:
            raise RuntimeError(f"losses differ by {off:.2g}: not the same step, so there is nothing to compare")
        costs = []
        for contender in contenders:
            profiled = contender.profile() if case.device == "cpu" or options.profile else None
            if profiled and options.profile:
                print(f"{contender.name}\n{profiled['table']}", file=sys.stderr)
            in_tensors = profiled["tensor_bytes"] if profiled and case.device == "cpu" else None
            costs.append(_cost(contender, options.warm_up, in_tensors))
        raw = {
            f"{contender.name}, {what} s": [took["wall_seconds" if what == "wall" else "cpu_seconds"] for took in timed]
            for contender in contenders
            for timed in [contender.steps[options.warm_up :]]
            for what in ("wall", "CPU")
        }
        return costs, off, raw


def _largest_loss_difference(contenders: Sequence[Contender]) -> float:
    losses_of_each = [[took["loss"] for took in contender.steps] for contender in contenders]
    per_step: Iterator[tuple[float, ...]] = zip(*losses_of_each, strict=True)
    return max(max(losses) - min(losses) for losses in per_step)


def _cost(contender: Contender, warm_up: int, tensor_bytes: float | None) -> Cost:
    timed = contender.steps[warm_up:]
    peak = max(took["peak_bytes"] for took in contender.steps)
    return Cost(
        contender.name,
        median(took["wall_seconds"] for took in timed),
        median(took["cpu_seconds"] for took in timed),
        peak,
        peak - contender.loaded_bytes if tensor_bytes is None else tensor_bytes,
    )


def _flops(shape: Shape, ids: Sequence[Ids]) -> float:
    """Return the FLOPs of a step, without recomputed activations.

    Reference forward, forward, and a backward pass that needs gradients of activations only: three times a
    forward for weights, four times for attention, whose backward pass has two factors to differentiate.
    """
    lengths = _lengths(ids)
    tokens = sum(lengths)
    projected = sum(len(response) for _, response in ids)
    weights = tokens * shape.parameters_read_per_token + projected * shape.hidden_size * shape.vocab_size
    width = shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim
    attention = sum(length**2 for length in lengths) * width
    return 3 * 2 * weights + 4 * 2 * attention


def _lengths(ids: Sequence[Ids]) -> list[int]:
    """Return the input tokens of each sample; the last token is only a target."""
    return [len(prompt) + len(response) - 1 for prompt, response in ids]


def _tokens(
    ids: Sequence[Ids], case: Case, tokens: int, options: argparse.Namespace
) -> tuple[list[str], dict[str, Ratio]]:
    """Tokens that a session's turns share, and tokens saved by scoring hinted prompts with the plain ones."""
    session, last = (tokens_of_session(turns, case, options.tokens) for turns in (ids, ids[-1:]))
    told = [
        f"tokens of a forward pass: {session.plain} shared, {tokens} not; ratio {tokens / session.plain:.2f}",
        "and of the passes before, where all have a hint and the base model teaches:",
    ]
    ratios = {"tokens of a forward pass, shared to not": Ratio(session.plain / tokens, "lower")}
    for what, read in (("the session", session), ("its last turn", last)):
        apart = read.plain + read.hinted
        told.append(
            f"{what}: {read.joined} joined, reference {read.plain} and teacher {read.hinted} apart; "
            f"ratio {apart / read.joined:.2f}"
        )
        ratios[f"tokens of reference and teacher of {what}, joined to apart"] = Ratio(read.joined / apart, "lower")
    return told, ratios


def _peak_flops(tflops_option: float | None) -> float | None:
    if tflops_option is not None:
        return tflops_option * 1e12
    name = torch.cuda.get_device_name()
    return next((tflops * 1e12 for known, tflops in PEAK_TFLOPS.items() if known in name), None)


def _shape(comparison: Comparison, options: argparse.Namespace, small: Shape) -> Shape:
    if comparison.family == "llama":
        return SMOLLM2_SHAPE
    return GPU_SHAPES[comparison.family] if options.gpu else small


def _case(comparison: Comparison, ids: Sequence[Ids], options: argparse.Namespace) -> Case:
    small = Shape(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(1, options.hidden // 128),
        head_dim=64,
    )
    return Case(
        family=comparison.family,
        shape=_shape(comparison, options, small),
        dtype=options.dtype,
        device="cuda" if options.gpu else "cpu",
        rank=options.rank,
        # An OpenClaw request is about as long as a trainer's default micro-batch.
        samples_at_once=1 if comparison.is_session else options.samples_at_once,
        threads=options.threads,
        max_tokens=max(_lengths(ids)) + HINT_TOKENS * comparison.by_hints,
    )
