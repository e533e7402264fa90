"""The forward pass of pretraining is transformers' Qwen3, lesson by lesson, and so are its gradients."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from clawloop.app.demo.forward import last_states

LENGTHS = (5, 9)


def small_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # scales of 1 would hide where they belong
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.dim() == 1))
    return model


def test_it_computes_what_transformers_does() -> None:
    model = small_model()
    tokens = torch.randint(40, (sum(LENGTHS),))
    rows = torch.tensor([1, 4, 5, 12])
    ours = model.lm_head(last_states(model, model.model.embed_tokens(tokens), LENGTHS, rows))
    torch.autograd.backward(ours.square().sum())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    theirs = torch.cat([model(part[None]).logits[0] for part in torch.split(tokens, list(LENGTHS))])[rows]
    torch.autograd.backward(theirs.square().sum())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-3, msg=name)
