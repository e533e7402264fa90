"""Loads a base model with a fresh adapter, by the backend of its family, on one rank or several.

The libraries that compute a model are imported with it: an idle trainer, and one that uses the other backend, keeps
their memory free (130 MB of torchtune and what it loads of torch, FSDP 40 MB, measured).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from clawloop.core.errors import ModelUnsupported
from clawloop.training.model.checkpoint import read_family
from clawloop.training.model.port import LoraShape, PolicyModel
from clawloop.training.options import Backend, Quantisation

# Shards ---------------------------------------------------------------------------------------------------------------
# Loads a model sharded over the ranks of a step, with FSDP2.


def load_sharded_model(
    checkpoint: Path,
    lora: LoraShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int | None = None,
    backend: Backend | None = None,
    recompute_beyond: int | None = 0,
    quantisation: Quantisation | None = None,
    seed: int = 0,
) -> PolicyModel:
    """A model with every tensor sharded over the ranks of the default group, layer by layer.

    Arguments and numerical results are those of `loading.load_model`.

    Raises:
        ModelUnsupported: see `loading.load_model`; also quantised weights, which FSDP does not shard here.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if quantisation is not None:
        raise ModelUnsupported("--quantise needs the base model whole on each rank: --ranks replicated")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    family = read_family(checkpoint, backend, max_tokens)
    if family.backend == "transformers":
        from clawloop.training.model.transformers_model import load_transformers_model

        # Whole in each rank's memory first, on the CPU: FSDP takes a layer at a time to its device.
        loaded = load_transformers_model(
            checkpoint,
            family,
            lora,
            dtype=dtype,
            device=torch.device("cpu"),
            max_tokens=max_tokens,
            recompute=recompute_beyond is not None,
            seed=seed,
        )
        for layer in loaded.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(loaded, mesh=mesh)
        return loaded
    from clawloop.training.model.decoder import build_model, fill_model

    model = build_model(
        checkpoint,
        lora,
        dtype=dtype,
        max_tokens=max_tokens,
        recompute_beyond=recompute_beyond,
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fill_model(model, checkpoint, device, seed=seed)
    return model


# Loading --------------------------------------------------------------------------------------------------------------
# Loads a base model with a fresh adapter, by the backend of its family.


def load_model(
    checkpoint: Path,
    lora: LoraShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int | None = None,
    backend: Backend | None = None,
    recompute_beyond: int | None = 0,
    quantisation: Quantisation | None = None,
    seed: int = 0,
) -> PolicyModel:
    """The model of one process.

    Args:
        checkpoint: Hugging Face directory.
        lora: shape of the adapter.
        dtype: of base weights and arithmetic, float32 or bfloat16.
        max_tokens: longest document; None: all positions of the checkpoint.
        backend: see `read_family`.
        recompute_beyond: tokens of a micro-batch beyond which each layer is computed again in the backward pass, which
            saves memory; None: never. The backend of transformers knows only never and, for any number, always.
        quantisation: of the base model's projections; None: none.
        seed: of the fresh adapter.

    Raises:
        ModelUnsupported: an architecture, feature or file that no backend supports.
    """
    family = read_family(checkpoint, backend, max_tokens)
    if family.backend == "torchtune":
        from clawloop.training.model.decoder import load_torchtune_model

        return load_torchtune_model(
            checkpoint,
            lora,
            dtype=dtype,
            device=device,
            max_tokens=max_tokens,
            recompute_beyond=recompute_beyond,
            quantisation=quantisation,
            seed=seed,
        )
    from clawloop.training.model.transformers_model import load_transformers_model

    return load_transformers_model(
        checkpoint,
        family,
        lora,
        dtype=dtype,
        device=device,
        max_tokens=max_tokens,
        recompute=recompute_beyond is not None,
        quantisation=quantisation,
        seed=seed,
    )
