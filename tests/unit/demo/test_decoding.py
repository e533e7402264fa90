"""The demo's own decoding says what transformers' does."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3ForCausalLM

from clawloop.app.demo.decoding import Decoder
from tests.unit.demo.test_forward import small_model

END = 3
PROMPTS = [[5, 9, 11, 7, 2], [8], [14, 6, 6], [5, 9, 11, 7, 2]]
LONGEST = 24


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    return small_model().eval()


def next_logits(model: Qwen3ForCausalLM, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0, -1]
    return logits


def greedy(model: Qwen3ForCausalLM, prompt: list[int]) -> list[int]:
    reply: list[int] = []
    while len(reply) < LONGEST and reply[-1:] != [END]:
        reply.append(int(next_logits(model, prompt + reply).argmax()))
    return reply


def test_replies_of_a_batch_are_those_of_each_prompt_alone(model: Qwen3ForCausalLM) -> None:
    with torch.no_grad():  # so that some replies end and others do not
        model.model.embed_tokens.weight[END] *= 2
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert len({len(reply) for reply in expected}) > 1
    assert Decoder(model, END).replies(PROMPTS, 0.0, LONGEST) == expected


def test_drafts_change_nothing(model: Qwen3ForCausalLM) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[END] *= 2
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    half_right = [*expected[1][:3], 1, 1, END]
    drafts = [[[1, END], expected[0]], [half_right, expected[1]], [], [expected[0][:2]]]
    assert Decoder(model, END).replies(PROMPTS, 0.0, LONGEST, drafts) == expected


@pytest.mark.parametrize("draft", [[7, END], [5, 7, END], [7, 5, 9]])
def test_what_drafts_propose_is_drawn_as_often_as_without(model: Qwen3ForCausalLM, draft: list[int]) -> None:
    torch.manual_seed(0)
    draws = 4000
    replies = Decoder(model, END).replies([PROMPTS[0]] * draws, 4.0, 2, [[draft]] * draws)
    odds = (next_logits(model, PROMPTS[0]) / 4.0).softmax(-1)
    first = draft[0]
    after = (next_logits(model, [*PROMPTS[0], first]) / 4.0).softmax(-1)
    firsts = torch.bincount(torch.tensor([reply[0] for reply in replies]), minlength=40) / draws
    assert (firsts - odds).abs().max() < 0.03
    pairs = torch.bincount(torch.tensor([reply[1] for reply in replies if reply[0] == first]), minlength=40)
    assert pairs.sum() > 50
    assert (pairs / pairs.sum() - after).abs().max() < 4 * 0.5 / float(pairs.sum()) ** 0.5


def test_log_probabilities_of_replies_are_the_models(model: Qwen3ForCausalLM) -> None:
    replies = [[4, 8, END], [9], [1, 2, 3, 4], [6, 6]]
    found = Decoder(model, END).logprobs(PROMPTS, replies, 2.0)
    for prompt, reply, values in zip(PROMPTS, replies, found, strict=True):
        expected = [
            float((next_logits(model, prompt + reply[:place]) / 2.0).log_softmax(-1)[token])
            for place, token in enumerate(reply)
        ]
        assert values == pytest.approx(expected, abs=1e-4)


def test_tokens_are_drawn_as_often_as_the_model_says(model: Qwen3ForCausalLM) -> None:
    torch.manual_seed(0)
    draws = 4000
    replies = Decoder(model, END).replies([PROMPTS[0]] * draws, 2.0, 1)
    shares = torch.bincount(torch.tensor([reply[0] for reply in replies]), minlength=40) / draws
    odds = (next_logits(model, PROMPTS[0]) / 2.0).softmax(-1)
    assert (odds > 0.05).sum() > 1
    assert (shares - odds).abs().max() < 0.03
