"""Memory of one layer's backward pass if transformers computes the model and PEFT its LoRA.

Letters as in `clawloop.layout.trainer`. The factors were fitted to torch's own record of every allocation for Llama,
Mistral and Gemma 3, in eighteen shapes, and are compared with it in `tests/training/test_planned_peft_memory.py`.
"""

from __future__ import annotations

from clawloop.layout.model_shape import ModelShape
from clawloop.layout.request import TrainingNeeds
from clawloop.training.model.architecture import SUPPORTED

_MEASURED = ("LlamaForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")


def is_by_peft(model: ModelShape) -> bool:
    """True if the trainer has no modules of its own for this architecture."""
    return model.architecture not in SUPPORTED


def is_measured(model: ModelShape) -> bool:
    return not is_by_peft(model) or model.architecture in _MEASURED


def one_peft_layer(model: ModelShape, needs: TrainingNeeds, tokens: int, number_bytes: int) -> int:
    """A layer computed again, with its gradients, at the MLP's backward pass, or attention's if that is more.

    PEFT multiplies with LoRA in float32: in bfloat16 each projection's input is copied, and so is the gradient of its
    output. So the MLP's features take 19 bytes each (24 in float32), and the model's 40 (20). Queries, keys and values
    are kept as they are (4·Q·b and 2·K·b), the head norms' inputs in float32 (Q and K), low-rank products too (10·r).
    """
    b = number_bytes
    of_inner, of_width = (19, 40) if b == 2 else (24, 20)
    head_norms = (model.query + model.key) * 4 if model.head_norm else 0
    in_attention = (5 if model.head_norm else 1) * model.query * b
    kept = of_width * model.width + 4 * model.query * b + 2 * model.key * b + head_norms + 10 * needs.rank
    return tokens * (kept + max(of_inner * model.inner, in_attention)) + _mask(model, tokens, b)


def _mask(model: ModelShape, tokens: int, number_bytes: int) -> int:
    """Layers with a window get a mask of S·S as soon as a document is longer: booleans, and numbers for the kernel."""
    if model.kv.sliding == 0 or tokens <= model.kv.window:
        return 0
    return tokens * tokens * (1 + number_bytes)
