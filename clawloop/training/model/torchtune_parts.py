"""The modules we use of torchtune (no longer developed, hence pinned), imported without its data sets.

On import torchtune loads Hugging Face's `datasets`, and with it pandas and pyarrow, for its own recipes: 2 s of every
trainer's start and 90 MB in every rank (measured), for two functions that none of these modules call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_UNUSED = {"datasets": ["load_dataset"], "datasets.distributed": ["split_dataset_by_node"]}


@contextmanager
def _stand_ins(unused: dict[str, list[str]]) -> Iterator[None]:
    """Within the block, these modules are empty stand-ins; a later import gets the real module."""
    missing = {name: functions for name, functions in unused.items() if name not in sys.modules}
    for name, functions in missing.items():
        module = ModuleType(name)
        module.__path__ = []
        for function in functions:
            setattr(module, function, None)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


with _stand_ins(_UNUSED):
    from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
    from torchtune.modules import FeedForward, MultiHeadAttention, RMSNorm, TransformerSelfAttentionLayer
    from torchtune.modules.peft import LoRALinear

__all__ = [
    "FeedForward",
    "LoRALinear",
    "MultiHeadAttention",
    "Qwen2RotaryPositionalEmbeddings",
    "RMSNorm",
    "TransformerSelfAttentionLayer",
]
