"""Scores and gradients along a prefix tree on a GPU are those of separate documents, by flash kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from clawloop.core.contracts.training import BatchSample
from clawloop.training.batch import plain_sequence
from clawloop.training.model.decoder import load_torchtune_model
from clawloop.training.model.port import LoraShape
from clawloop.training.packing import collate
from tests.gpu.device import DEVICE, needs_device
from tests.training.tiny import relative_error, save_checkpoint, session_batch, shake_adapter

pytestmark = [
    pytest.mark.gpu,
    needs_device,
]


def scored(base: Path, dtype: torch.dtype, samples: list[BatchSample], share: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of all samples, and the gradient of their sum."""
    model = load_torchtune_model(base, LoraShape(rank=4, alpha=8.0), dtype=dtype, device=torch.device(DEVICE))
    shake_adapter(model)
    packed = collate([plain_sequence(sample) for sample in samples], range(8), share_prefixes=share).to(model.device)
    logprobs_N = model(packed).logprobs_N
    logprobs_N.sum().backward()
    gradients = {name: p.grad for name, p in model.adapter_parameters().items() if p.grad is not None}
    return logprobs_N.detach().float(), gradients


def test_shared_prefixes_change_neither_log_probs_nor_gradients(tmp_path: Path) -> None:
    base, cpu = save_checkpoint(tmp_path, dtype=torch.bfloat16), torch.device("cpu")
    samples = session_batch(load_torchtune_model(base, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=cpu))
    exact, exact_gradients = scored(base, torch.float32, samples, share=False)
    shared, shared_gradients = scored(base, torch.float32, samples, share=True)
    assert (shared - exact).abs().mean() < 1e-4
    assert relative_error(shared_gradients, exact_gradients) < 1e-4
    # In bfloat16 they are as far from that as separate documents are.
    plain, plain_gradients = scored(base, torch.bfloat16, samples, share=False)
    shared, shared_gradients = scored(base, torch.bfloat16, samples, share=True)
    assert (shared - exact).abs().mean() < 1.3 * (plain - exact).abs().mean()
    rounding = relative_error(plain_gradients, exact_gradients)
    assert relative_error(shared_gradients, exact_gradients) < 1.3 * rounding


@pytest.mark.parametrize("share", [True, False])
def test_attention_in_bfloat16_runs_flash_kernels(share: bool, tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path, dtype=torch.bfloat16)
    cpu, cuda = torch.device("cpu"), torch.device(DEVICE)
    samples = session_batch(load_torchtune_model(base, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=cpu))
    model = load_torchtune_model(base, LoraShape(rank=4, alpha=8.0), dtype=torch.bfloat16, device=cuda)
    packed = collate([plain_sequence(sample) for sample in samples], range(8), share_prefixes=share).to(cuda)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where another kernel would be needed
        model(packed).logprobs_N.sum().backward()
    assert all(parameter.grad is not None for parameter in model.adapter_parameters().values())
