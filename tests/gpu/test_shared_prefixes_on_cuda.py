"""Scores and gradients along a prefix tree on a GPU are those of separate documents, by flash kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from clawloop.training.batch import plain_sequence
from clawloop.training.model.lora import LoraShape
from clawloop.training.model.torchtune_loading import load_torchtune_model
from clawloop.training.packing.collate import collate
from tests.training.tiny import relative_error, save_checkpoint, session_batch, shake_adapter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


@pytest.mark.parametrize(
    ("dtype", "logprobs_off", "gradients_off"), [(torch.float32, 1e-4, 1e-4), (torch.bfloat16, 0.1, 0.1)]
)
def test_shared_prefixes_change_neither_log_probs_nor_gradients(
    dtype: torch.dtype, logprobs_off: float, gradients_off: float, tmp_path: Path
) -> None:
    base = save_checkpoint(tmp_path, dtype=dtype)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    samples = session_batch(load_torchtune_model(base, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=cpu))
    model = load_torchtune_model(base, LoraShape(rank=4, alpha=8.0), dtype=dtype, device=cuda)
    shake_adapter(model)
    found = []
    for share in (True, False):
        model.zero_grad()
        packed = collate([plain_sequence(sample) for sample in samples], range(8), share_prefixes=share).to(cuda)
        logprobs_N = model(packed).logprobs_N
        logprobs_N.sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.adapter_parameters().items() if p.grad is not None}
        found.append((logprobs_N.detach(), gradients))
    (logprobs, gradients), (plain_logprobs, plain_gradients) = found
    assert (logprobs - plain_logprobs).abs().mean() < logprobs_off
    assert relative_error(gradients, plain_gradients) < gradients_off


@pytest.mark.parametrize("share", [True, False])
def test_attention_in_bfloat16_runs_flash_kernels(share: bool, tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path, dtype=torch.bfloat16)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    samples = session_batch(load_torchtune_model(base, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=cpu))
    model = load_torchtune_model(base, LoraShape(rank=4, alpha=8.0), dtype=torch.bfloat16, device=cuda)
    packed = collate([plain_sequence(sample) for sample in samples], range(8), share_prefixes=share).to(cuda)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where another kernel would be needed
        model(packed).logprobs_N.sum().backward()
    assert all(parameter.grad is not None for parameter in model.adapter_parameters().values())
