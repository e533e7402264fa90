"""The models of transformers with LoRA by PEFT: the only module of the trainer that imports either.

Each document is computed alone: layers with a recurrent state or a sliding window of their own know no other way to
tell documents apart, and a causal forward without a mask runs the fastest kernels there are.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from clawloop.core.errors import ModelUnsupported
from clawloop.training.model.checkpoint import Family
from clawloop.training.model.decoder import quantise
from clawloop.training.model.port import LoraShape, reset_adapter
from clawloop.training.model.token_scores import Comparing, TokenScores, score_responses
from clawloop.training.options import Quantisation
from clawloop.training.packing import MicroBatch

_PEFT_PREFIX = "base_model.model."
_PROBE = (1, 2, 3, 5)
# Kernels may differ between one call and another; a scale or cap that is left out differs by far more.
_PROBE_TOLERANCE = 0.05


class TransformersModel(nn.Module):
    """A decoder of transformers with one adapter. Satisfies `port.PolicyModel`.

    Args:
        peft: the model with its adapter.
        family: names of its tensors.
        lora: shape of the adapter.
        max_tokens: longest document.
    """

    packs_documents = False

    def __init__(self, peft: PeftModel, family: Family, lora: LoraShape, *, max_tokens: int):
        super().__init__()
        self.peft = peft
        self.lora = lora
        self.max_tokens = max_tokens
        self._family = family
        self._softcap: float | None = getattr(self._causal.config, "final_logit_softcapping", None)

    @property
    def _causal(self) -> PreTrainedModel:
        return self.peft.base_model.model

    @property
    def device(self) -> torch.device:
        embeddings: nn.Module = self._causal.model.embed_tokens
        return next(embeddings.parameters()).device

    @property
    def layers(self) -> Iterable[nn.Module]:
        """The decoder's layers, which FSDP shards one by one."""
        layers: nn.ModuleList = self._causal.model.layers
        return layers

    @property
    def vocab_size(self) -> int:
        return int(self._causal.config.vocab_size)

    @property
    def is_sharded(self) -> bool:
        """See `port.PolicyModel`."""
        return isinstance(self, FSDPModule)

    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        """See `port.PolicyModel`."""
        named = {self._file_name(name): p for name, p in self.peft.named_parameters() if ".lora_" in name}
        return dict(sorted(named.items()))

    def _file_name(self, parameter: str) -> str:
        inner = parameter.removeprefix(_PEFT_PREFIX).replace(".default.", ".")
        return f"{_PEFT_PREFIX}{self._family.decoder_prefix}{inner.removeprefix('model.')}"

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """See `port.PolicyModel`."""
        with self.peft.disable_adapter():
            yield

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """[S, D]: hidden states after the final norm, of each document alone.

        Raises:
            ValueError: documents share tokens.
        """
        layout = micro_batch.layout
        if layout.attends_to != tuple((index,) for index in range(len(layout.lengths))):
            raise ValueError("documents that share prefixes; collate them with share_prefixes=False")
        documents = torch.split(micro_batch.tokens_S, list(layout.lengths))
        states = [self._causal.model(input_ids=ids[None], use_cache=False).last_hidden_state[0] for ids in documents]
        return states[0] if len(states) == 1 else torch.cat(states)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """See `port.PolicyModel`."""
        logits_NV: Tensor = self._causal.lm_head(hidden_ND).float()
        if self._softcap:
            logits_NV = self._softcap * torch.tanh(logits_NV / self._softcap)
        return logits_NV

    def forward(
        self,
        micro_batch: MicroBatch,
        *,
        entropies: bool = False,
        at_ids_NK: Tensor | None = None,
        comparing: Comparing | None = None,
    ) -> TokenScores:
        """See `port.PolicyModel`."""
        return score_responses(
            self.hidden_states(micro_batch),
            micro_batch,
            self.logits,
            self.vocab_size,
            entropies=entropies,
            at_ids_NK=at_ids_NK,
            comparing=comparing,
        )


def load_transformers_model(
    checkpoint: Path,
    family: Family,
    lora: LoraShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int | None = None,
    recompute: bool = True,
    quantisation: Quantisation | None = None,
    seed: int = 0,
) -> TransformersModel:
    """The decoder of this checkpoint, without towers for images or sound, with a fresh adapter.

    Args:
        checkpoint: Hugging Face directory.
        family: of the checkpoint.
        lora: shape of the adapter.
        dtype: float32 or bfloat16; LoRA weights are always float32.
        max_tokens: longest document; None: all positions of the checkpoint.
        recompute: compute each layer again in the backward pass, to save memory.
        quantisation: of the projections; None: none.

    Raises:
        ModelUnsupported: tensors are missing or of another shape, no projection can have LoRA, or the model does
            something with its logits that this module does not know.
    """
    causal = _read(checkpoint, family, dtype)
    if quantisation is None:
        causal.to(device)
    _remove_dropout(causal)
    _check_logits(causal, checkpoint)
    projections = _projections(causal, lora, checkpoint)
    if quantisation is not None:
        quantise(projections.values(), device)
        causal.to(device)
    peft = _with_lora(causal, lora, list(projections))
    positions = int(causal.config.max_position_embeddings)
    model = TransformersModel(
        peft, family, lora, max_tokens=positions if max_tokens is None else min(max_tokens, positions)
    )
    reset_adapter(model, seed)
    if recompute:
        # No random state to keep: nothing in the model draws random numbers.
        causal.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    model.train()  # what transformers recomputes layers by; there is no dropout
    return model


def _read(checkpoint: Path, family: Family, dtype: torch.dtype) -> PreTrainedModel:
    # transformers would print a bar, and a table of the tensors of towers, which are left out on purpose.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=True).get_text_config()
        causal, found = AutoModelForCausalLM.from_pretrained(
            checkpoint,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            key_mapping={r"^(model\.language_model|language_model\.model)\.": "model."},
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported by name below
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, LookupError, AttributeError, TypeError) as error:
        # transformers has no error type of its own for configs and files that it cannot read.
        raise ModelUnsupported(f"transformers cannot load {checkpoint}: {_first_line(error)}") from error
    for what in ("missing_keys", "mismatched_keys"):
        if names := sorted(entry[0] if isinstance(entry, tuple) else entry for entry in found[what]):
            raise ModelUnsupported(f"{checkpoint}: {len(names)} {what.replace('_', ' ')}, the first is {names[0]}")
    model: PreTrainedModel = causal
    return model


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _remove_dropout(causal: PreTrainedModel) -> None:
    """Set all dropout to 0: equal batches must give equal adapters, and the engine samples without dropout."""
    for module in causal.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "jitter_noise", "router_jitter_noise"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


@torch.no_grad()
def _check_logits(causal: PreTrainedModel, checkpoint: Path) -> None:
    """
    Raises:
        ModelUnsupported: the model's logits are not its head's, but scaled or changed in a way not known here.
    """
    ids = torch.tensor([_PROBE], device=causal.device) % causal.config.vocab_size
    expected = causal(input_ids=ids, use_cache=False).logits.float()
    logits = causal.lm_head(causal.model(input_ids=ids, use_cache=False).last_hidden_state).float()
    if softcap := getattr(causal.config, "final_logit_softcapping", None):
        logits = softcap * torch.tanh(logits / softcap)
    if not (logits - expected).norm() <= _PROBE_TOLERANCE * expected.norm():
        raise ModelUnsupported(f"{checkpoint} changes its logits in a way that the trainer does not know")


def _projections(causal: PreTrainedModel, lora: LoraShape, checkpoint: Path) -> dict[str, nn.Module]:
    """The modules that get adapters, by name; those of routed experts do not."""
    found: dict[str, nn.Module] = {
        name: module
        for name, module in causal.named_modules()
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in lora.targets and ".experts." not in name
    }
    if not found:
        raise ModelUnsupported(f"{checkpoint} has none of the projections {', '.join(lora.targets)}")
    return found


def _with_lora(causal: PreTrainedModel, lora: LoraShape, targets: list[str]) -> PeftModel:
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number
        lora_dropout=0.0,
        bias="none",
        target_modules=targets,
    )
    with warnings.catch_warnings():
        # PEFT warns of tied vocabularies, which have no adapter here.
        warnings.simplefilter("ignore", UserWarning)
        return get_peft_model(causal, config, autocast_adapter_dtype=True)
