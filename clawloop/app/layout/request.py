"""The input of a layout: limits, the recipe's needs, the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from clawloop.app.layout.model_folder import ModelShape
from clawloop.core.errors import SetupError
from clawloop.core.recipes.recipe import CONTROL, DEFAULT_RECIPE, MOST_HINTS, Recipe, require_decoupled
from clawloop.training.options import Dtype, Quantisation

LONGEST_CONTEXT_TOKENS = 32768
"""Longest context of an engine without an option for it: enough for an agent's prompt with tools; more costs memory."""
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's `--max-lora-rank` accepts (`vllm.config.lora.MaxLoRARanks`)."""
VERSIONS_OF_POLICY = 2
"""An engine has loaded a policy's active version and its candidate; judges are answered by the base weights."""
FEWEST_LORAS = VERSIONS_OF_POLICY
USUAL_LORAS = 4
"""The versions of one policy, and as many older versions whose replies have not ended."""
MOST_CHOSEN_LORAS = 32
"""Few of many policies answer at the same moment, and each LoRA slot takes memory from the KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes that engines and the trainer are configured for.

    Args:
        max_model_len: tokens of a prompt and its reply.
        max_sample_tokens: of the longest sample the trainer reads, its `--max-tokens`; `max_model_len` at most.
        micro_batch_tokens: tokens the trainer reads at once.
        max_loras: versions with running requests at the same time; others wait for a moment, and take turns.
        max_lora_rank: of the adapters an engine can load.
        policies: number of policies that the engine serves.
    """

    max_model_len: int
    max_sample_tokens: int
    micro_batch_tokens: int = 8192
    max_loras: int = 4
    max_lora_rank: int = 16
    policies: int = 1

    @property
    def max_cpu_loras(self) -> int:
        """Adapters an engine keeps in the machine's memory: the ones of all policies, and some loaded ahead."""
        return max(2 * self.max_loras, VERSIONS_OF_POLICY * self.policies)

    @property
    def micro_batch(self) -> int:
        """Most tokens the trainer reads at once.

        A sample may have all of `max_sample_tokens`, and beside a long one half the budget of what those add that
        share its beginning (`clawloop.training.packing.Limits.capacity`).
        """
        budget = min(self.micro_batch_tokens, self.max_sample_tokens)
        return self.max_sample_tokens + budget // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingNeeds:
    """The facts about a recipe that a layout depends on: how much memory a step takes, and what to note.

    Args:
        rank: the adapter's.
        compares_distributions: whole distributions are compared, so each position has further logits.
        controlled: the teachers are compared with a control, so each position has logits of that too.
        entropy: the entropy of each position is in the loss.
        hints: behind how many hints a reply is read, at most, in the micro-batch in which it is read without one; a
            control is one of them.
        default_rate: an update is as long as one of `hybrid` and `hindsight`, which no memory depends on.
    """

    rank: int = 16
    compares_distributions: bool = False
    controlled: bool = False
    entropy: bool = False
    hints: int = 0
    default_rate: bool = False


def needs_of(recipe: Recipe) -> TrainingNeeds:
    train = recipe.train
    places = (*range(MOST_HINTS if recipe.signal.asks_for_hints else 1), CONTROL)  # what the user says next is one
    return TrainingNeeds(
        rank=train.lora.rank,
        compares_distributions=train.loss.distillation > 0,
        controlled=train.loss.distillation > 0 and train.advantage.control,
        entropy=train.loss.entropy > 0,
        hints=len(train.documents_read(places)) if train.loss.distillation > 0 else 0,
        default_rate=train.optimiser == DEFAULT_RECIPE.train.optimiser,
    )


def require_decoupled_weights(recipe: Recipe) -> None:
    """Raise RecipeRejected if the recipe needs engine and trainer to compute with the same weights."""
    require_decoupled(
        recipe,
        "with --quantise or --serve-model engine and trainer compute with different weights",
        "in a recipe: --recipe deploy/recipes/quantised.toml has it",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs of a machine and who gets which.

    Args:
        sizes: bytes of each.
        serve, judge, train: indices; None where the layout shall choose, and for no judge engine of its own.
    """

    sizes: tuple[int, ...]
    serve: tuple[int, ...] | None = None
    judge: tuple[int, ...] | None = None
    train: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One question to `clawloop.app.layout.plan`.

    Args:
        gpus: None for a machine without.
        memory: bytes of the machine's memory that may be taken; looked at where there are no GPUs.
        training: None: only record and judge.
        dtype: of weights and arithmetic.
        judge_model: served by the judge engine; None: what the other engines serve, if there is a judge engine.
        serve_model: the quantised copy of `model` that engines serve; None: `model` itself.
        quantise: the trainer's base model, to 4 bits.
    """

    model: ModelShape
    limits: Limits
    gpus: Gpus | None
    memory: int
    training: TrainingNeeds | None
    dtype: Dtype
    judge_model: ModelShape | None = None
    serve_model: ModelShape | None = None
    quantise: Quantisation | None = None

    @property
    def number_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def for_engines(self) -> Request:
        """This request for the model that engines serve, which may be a quantised copy."""
        return self if self.serve_model is None else replace(self, model=self.serve_model)

    @property
    def for_judge(self) -> Request:
        """This request for the judge engine's model, whose context may be shorter."""
        if self.judge_model is None:
            return self.for_engines
        context = min(self.limits.max_model_len, self.judge_model.context_tokens)
        return replace(self, model=self.judge_model, limits=replace(self.limits, max_model_len=context))


def dtype_of(asked: str | None, stored: Dtype, *, on_gpus: bool) -> Dtype:
    """
    Args:
        stored: the model's own.

    Raises:
        SetupError: what is asked for is no type that engines compute in there.
    """
    if asked is None:
        return "bfloat16" if on_gpus else stored
    if asked == "bfloat16":
        return "bfloat16"
    if asked != "float32":
        raise SetupError(f"--dtype {asked}: use {'bfloat16' if on_gpus else 'float32 or bfloat16'}")
    if on_gpus:
        # `vllm.lora.ops.triton_ops.lora_shrink_op` asserts it, and the engine ends.
        raise SetupError(
            "--dtype float32: vLLM's LoRA kernels on CUDA compute in 16 bits alone: use bfloat16, or leave --dtype out"
        )
    return "float32"


def limits_for(
    model: ModelShape,
    training: TrainingNeeds | None,
    *,
    max_model_len: int | None = None,
    max_sample_tokens: int | None = None,
    micro_batch_tokens: int = 8192,
    max_loras: int | None = None,
    max_lora_rank: int | None = None,
    policies: int = 1,
) -> Limits:
    """Limits as asked for, the rest chosen by model and recipe.

    Raises:
        SetupError: a limit is more than the model, or less than the recipe, allows.
    """
    context = max_model_len or min(model.context_tokens, LONGEST_CONTEXT_TOKENS)
    sample = min(max_sample_tokens or context, context)  # no turn is longer than its context
    if context > model.context_tokens:
        raise SetupError(f"--max-model-len {context}: {model.name} was made for {model.context_tokens} tokens")
    rank = training.rank if training else 1
    large_enough = [size for size in ENGINE_RANKS if size >= rank]
    if not large_enough:
        raise SetupError(f"train.lora.rank {rank}: engines load adapters of rank {ENGINE_RANKS[-1]} at most")
    engine_rank = max_lora_rank or max(16, large_enough[0])
    if engine_rank not in ENGINE_RANKS:
        raise SetupError(f"--max-lora-rank {engine_rank}: engines take one of {', '.join(map(str, ENGINE_RANKS))}")
    if engine_rank < rank:
        raise SetupError(
            f"--max-lora-rank {engine_rank}: the recipe's adapters have rank {rank}: give {large_enough[0]}"
        )
    if max_loras is None:
        max_loras = min(max(USUAL_LORAS, VERSIONS_OF_POLICY * policies), MOST_CHOSEN_LORAS)
    if max_loras < FEWEST_LORAS:
        raise SetupError(f"--max-loras {max_loras}: at least {FEWEST_LORAS}, the active version and its successor")
    return Limits(
        max_model_len=context,
        max_sample_tokens=sample,
        micro_batch_tokens=micro_batch_tokens,
        max_loras=max_loras,
        max_lora_rank=engine_rank,
        policies=policies,
    )
