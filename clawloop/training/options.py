"""Values that options of a trainer have. Commands read them at their start: nothing heavy is imported here."""

from __future__ import annotations

from typing import Literal

Backend = Literal["torchtune", "transformers"]
"""`torchtune`: its modules, documents packed, shared prefixes computed once. `transformers`: its models with PEFT's
LoRA, each document alone."""

Dtype = Literal["float32", "bfloat16"]

Quantisation = Literal["nf4"]
"""4-bit format of a base model's projections, see `clawloop.training.model.decoder`."""

RankWeights = Literal["replicated", "sharded"]
"""Base weights on each of several ranks: `replicated` is the whole base model, `sharded` a share of it (FSDP)."""
