"""A small model in this process: transformers samples its replies, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from clawloop.app.demo.vocabulary import END, PAD
from clawloop.core.contracts.turns import Message

_BATCH_PROMPTS = 64  # per forward pass; a prompt has a few hundred tokens


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """
    Args:
        response_ids: with the end token, unless the reply was cut.
        logprobs: of each of them, at the temperature of the sampling; at 1 for a greedy reply.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]


class LocalModel:
    """
    Args:
        folder: a checkpoint in Hugging Face's format.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
        self.model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._end, self._pad = (int(self.tokenizer.convert_tokens_to_ids(token)) for token in (END, PAD))

    def prompt_ids(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> list[int]:
        """Tokenize a conversation with the beginning of a reply, as engines do by the chat template."""
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=True, tokenize=False
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def replies(self, chats: Sequence[Sequence[Message]], temperature: float, max_tokens: int) -> list[str]:
        """One reply to each chat; temperature 0 is greedy."""
        turns = self.sample([self.prompt_ids(chat) for chat in chats], temperature, max_tokens)
        return [self.text(turn.response_ids) for turn in turns]

    def text(self, reply: Sequence[int]) -> str:
        """The text of a reply's ids."""
        return str(self.tokenizer.decode(reply[:-1] if reply[-1:] == [self._end] else reply))

    def sample(self, prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int) -> list[SampledTurn]:
        """One reply to each prompt; temperature 0 is greedy."""
        batches = (prompts[at : at + _BATCH_PROMPTS] for at in range(0, len(prompts), _BATCH_PROMPTS))
        return [turn for batch in batches for turn in self._sampled(batch, temperature, max_tokens)]

    @torch.no_grad()
    def next_logits(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """The logits after each prompt: [prompts, vocabulary]."""
        found = []
        for at in range(0, len(prompts), _BATCH_PROMPTS):
            batch = prompts[at : at + _BATCH_PROMPTS]
            width = max(map(len, batch))
            # Attention is causal, so that a prompt does not see the padding after it.
            ids_BT = torch.tensor([[*ids, *[self._pad] * (width - len(ids))] for ids in batch])
            states_BTH = self.model.model(input_ids=ids_BT).last_hidden_state
            last_BH = states_BTH[range(len(batch)), [len(ids) - 1 for ids in batch]]
            found.append(self.model.lm_head(last_BH))
        return torch.cat(found)

    @torch.no_grad()
    def _sampled(self, prompts: Sequence[Sequence[int]], temperature: float, max_tokens: int) -> list[SampledTurn]:
        width = max(map(len, prompts))
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        generated = self.model.generate(
            input_ids=torch.tensor([[*[self._pad] * (width - len(ids)), *ids] for ids in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]),
            max_new_tokens=max_tokens,
            eos_token_id=self._end,
            pad_token_id=self._pad,
            return_dict_in_generate=True,
            output_logits=True,
            **sampling,
        )
        logprobs_BTV = torch.log_softmax(torch.stack(generated.logits, 1) / (temperature or 1.0), -1)
        turns = []
        for row, (prompt, ids) in enumerate(zip(prompts, generated.sequences[:, width:].tolist(), strict=True)):
            reply = ids[: ids.index(self._end) + 1] if self._end in ids else ids
            logprobs = [float(logprobs_BTV[row, at, token]) for at, token in enumerate(reply)]
            turns.append(SampledTurn(list(prompt), reply, logprobs))
        return turns
