"""The decoder compared with that of transformers on the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from clawloop.core.errors import ModelUnsupported
from clawloop.training.model import token_scores
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.decoder import TorchtuneModel, load_torchtune_model
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape
from clawloop.training.packing import TokenSequence, collate
from tests.training.tiny import (
    LLAMA3_ROPE,
    VOCAB,
    Family,
    all_logits,
    random_ids,
    random_sequences,
    reference_model,
    save_checkpoint,
    shake_adapter,
)

CPU = torch.device("cpu")


def load(path: Path, dtype: torch.dtype = torch.float32) -> TorchtuneModel:
    return load_torchtune_model(path, LoraShape(rank=4, alpha=8.0), dtype=dtype, device=CPU)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
def test_logits_in_float32_are_those_of_transformers(
    tmp_path: Path, family: Family, tied: bool, shard_size: str
) -> None:
    path = save_checkpoint(tmp_path, family, tied=tied, shard_size=shard_size)
    assert (len(BaseWeights(path).files()) > 1) is (shard_size == "100KB")
    ids = random_ids(120)
    with torch.no_grad():
        expected = reference_model(path)(torch.tensor([ids])).logits[0]
    difference = (all_logits(load(path), ids) - expected).abs().max()
    assert expected.abs().max() > 1
    assert difference < 1e-4


def test_llama_3s_frequencies_are_those_of_transformers(tmp_path: Path) -> None:
    scaled = save_checkpoint(tmp_path / "llama3", "llama", rope_scaling=LLAMA3_ROPE)
    plain = save_checkpoint(tmp_path / "llama", "llama")
    ids = random_ids(200)
    with torch.no_grad():
        expected = reference_model(scaled)(torch.tensor([ids])).logits[0]
    found = all_logits(load(scaled), ids)
    assert (found - expected).abs().max() < 1e-4
    assert (found - all_logits(load(plain), ids)).abs().max() > 0.1


def test_documents_longer_than_a_sliding_window_are_not_packed(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, "mistral", sliding_window=48)
    with pytest.raises(ModelUnsupported, match=r"sliding-window attention \(48 tokens\)"):
        load(path)
    within = load_torchtune_model(path, LoraShape(), dtype=torch.float32, device=CPU, max_tokens=48)
    ids = random_ids(48)
    with torch.no_grad():
        expected = reference_model(path)(torch.tensor([ids])).logits[0]
    assert (all_logits(within, ids) - expected).abs().max() < 1e-4
    # The other backend attends to the window alone.
    by_window = load_model(path, LoraShape(), dtype=torch.float32, device=CPU)
    assert not by_window.packs_documents
    sequence = TokenSequence("long", random_ids(120)[:80], random_ids(120)[80:], 1.0)
    with torch.no_grad():
        logits = reference_model(path)(torch.tensor([random_ids(120)])).logits[0, 79:-1]
        found = by_window(collate([sequence], [0], share_prefixes=False)).logprobs_N
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(sequence.response_ids)[:, None])[:, 0]
    assert (found - expected).abs().max() < 1e-4
    unwindowed = load(save_checkpoint(tmp_path / "without", "mistral"))
    with torch.no_grad():
        assert (unwindowed(collate([sequence], [0])).logprobs_N - expected).abs().max() > 0.1


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_logits_in_bfloat16_are_as_near_to_float32_as_those_of_transformers(tmp_path: Path, family: Family) -> None:
    path = save_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    ids = random_ids(120)
    with torch.no_grad():
        exact = reference_model(path)(torch.tensor([ids])).logits[0].log_softmax(-1)
        theirs = reference_model(path, torch.bfloat16)(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    ours = all_logits(load(path, torch.bfloat16), ids).log_softmax(-1)
    assert (ours - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


def test_rope_and_norms_stay_float32_in_a_bfloat16_model(qwen3: Path) -> None:
    model = load(qwen3, torch.bfloat16)
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes["layers.0.attn.q_proj.norm.scale"] == torch.float32
    assert dtypes["layers.0.attn.q_proj.proj.lora_a.weight"] == torch.float32
    assert dtypes["layers.0.attn.q_proj.proj.weight"] == torch.bfloat16
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if ".lora_" in name
    }


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
def test_packed_documents_are_scored_as_single_ones(family: Family, tmp_path: Path) -> None:
    model = load(save_checkpoint(tmp_path, family))
    shake_adapter(model)
    sequences = random_sequences([(9, 5), (3, 17), (1, 1), (30, 2)])
    packed = collate(sequences, range(len(sequences)))
    with torch.no_grad():
        packed_logprobs = packed.split(model(packed).logprobs_N)
        for index in range(len(sequences)):
            alone = model(collate(sequences, [index])).logprobs_N
            assert (packed_logprobs[index] - alone).abs().max() < 1e-5


def test_logprobs_are_of_logits_divided_by_the_recorded_temperature(qwen3: Path) -> None:
    model = load(qwen3)
    ids = random_ids(20)
    logits = all_logits(model, ids[:-1])[11:]
    for temperature in (0.6, 1.0, 1.7):
        packed = collate([TokenSequence("t", ids[:12], ids[12:], temperature)], [0])
        expected = (logits / temperature).log_softmax(-1)
        likeliest = expected.topk(3)
        with torch.no_grad():
            read = model(packed, entropies=True, at_ids_NK=likeliest.indices)
        targets = torch.tensor(ids[12:])
        assert torch.allclose(read.logprobs_N, expected.gather(-1, targets[:, None])[:, 0], atol=1e-5)
        assert torch.allclose(read.entropies_N, -(expected.exp() * expected).sum(-1), atol=1e-5)
        assert torch.allclose(read.topk_logprobs_NK, likeliest.values, atol=1e-5)
        assert torch.allclose(read.tails_N, (1 - likeliest.values.exp().sum(-1)).log(), atol=1e-4)


@pytest.mark.parametrize("beyond", [None, 0])
def test_scoring_in_chunks_gives_the_same_scores_and_gradients(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, beyond: int | None
) -> None:
    packed = collate(random_sequences([(9, 5), (3, 17)]), [0, 1])
    readings, gradients = [], []
    for logits_at_once, recomputed in ((2**26, None), (4 * VOCAB, beyond)):
        monkeypatch.setattr(token_scores, "_MAX_LOGITS", logits_at_once)
        model = load(qwen3)
        model.recompute_beyond = recomputed
        shake_adapter(model)
        reading = model(packed, at_ids_NK=torch.arange(44).view(22, 2))
        (reading.logprobs_N.sum() + reading.topk_logprobs_NK.sum()).backward()
        readings.append(reading.logprobs_N.detach())
        gradients.append([p.grad for p in model.adapter_parameters().values()])
    assert torch.allclose(readings[0], readings[1], atol=1e-6)
    for first, second in zip(*gradients, strict=True):
        assert first is not None
        assert second is not None
        assert torch.allclose(first, second, rtol=1e-4, atol=1e-5)


def test_without_its_adapter_the_model_is_its_base(qwen3: Path) -> None:
    ids = random_ids(40)
    model = load(qwen3)
    base = all_logits(model, ids)
    shake_adapter(model)
    changed = all_logits(model, ids)
    with model.without_adapter():
        off = all_logits(model, ids)
    assert torch.equal(off, base)
    assert (changed - base).abs().max() > 0.1
    assert torch.equal(all_logits(model, ids), changed)


def edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
            "Gemma3ForCausalLM.*packed for Qwen3",
        ),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling.*yarn"),
        ({"use_sliding_window": True, "sliding_window": 32}, "sliding-window"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"attention_bias": True}, "attention biases"),
        ({"mlp_bias": True}, "biases of the MLP"),
        ({"partial_rotary_factor": 0.5}, "a rotation of some of each head"),
        ({"vocab_size": None}, "vocab_size"),
        ({"intermediate_size": 96}, r"w1|w2|w3"),
    ],
)
def test_an_unsupported_model_feature_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = save_checkpoint(tmp_path)
    edit_config(path, **changes)
    with pytest.raises(ModelUnsupported, match=message):
        load(path)


def test_a_missing_shard_is_refused_by_name(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, shard_size="100KB")
    last = sorted(BaseWeights(path).files())[-1]
    (path / last).unlink()
    with pytest.raises(ModelUnsupported, match=last):
        load(path)


def test_the_fingerprint_distinguishes_two_models_of_one_shape(tmp_path: Path, qwen3: Path) -> None:
    same = BaseWeights(save_checkpoint(tmp_path / "a")).fingerprint()
    other = BaseWeights(save_checkpoint(tmp_path / "b", seed=1)).fingerprint()
    assert BaseWeights(qwen3).fingerprint() == same
    assert other != same
