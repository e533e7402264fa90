"""Attempts at tasks in this process, for measuring a model before any engine runs.

Replies are sampled by transformers, and sums that a reply calls for are calculated here instead of in a sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from clawloop.contracts.turns import Message
from clawloop.demo.tool_calls.lessons import call
from clawloop.demo.vocabulary import END, PAD
from clawloop.environments.tool_call.environment import AGENT, Question

_MAX_TOKENS = 32  # the longest right reply has 14
_SUM = re.compile(r"print\((-?\d+) ([-+*]) (-?\d+)\)")
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SampledTurn:
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class Attempt:
    asked: Question
    messages: list[Message]
    turns: list[SampledTurn] = field(default_factory=list)
    reward: float | None = None  # None while it goes on


class ToolCallModel:
    """
    Args:
        folder: a checkpoint in Hugging Face's format.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
        self.model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._end = self.tokenizer.convert_tokens_to_ids(END)
        self._pad = self.tokenizer.convert_tokens_to_ids(PAD)

    def attempts(self, questions: Sequence[Question]) -> list[Attempt]:
        """One attempt at each, by the environment's rules; sampled at temperature 1."""
        made = [Attempt(asked, [{"role": "user", "content": asked.text}]) for asked in questions]
        for _ in range(AGENT.turns):
            if not (going := [attempt for attempt in made if attempt.reward is None]):
                break
            for attempt, turn in zip(going, self._sample([self.prompt_ids(a.messages) for a in going]), strict=True):
                attempt.turns.append(turn)
                ids = turn.response_ids
                _go_on(attempt, self.tokenizer.decode(ids[:-1] if ids[-1] == self._end else ids))
        for attempt in made:
            attempt.reward = attempt.reward or 0.0
        return made

    def success(self, questions: Sequence[Question]) -> float:
        """Share of the questions that one attempt at each answers rightly."""
        return sum(attempt.reward or 0.0 for attempt in self.attempts(questions)) / len(questions)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Tokenize a conversation, with the environment's tool and the beginning of a reply."""
        parsed: list[Any] = [_with_objects(message) for message in messages]
        text = self.tokenizer.apply_chat_template(
            parsed, tools=[AGENT.tool], add_generation_prompt=True, tokenize=False
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @torch.no_grad()
    def _sample(self, prompts: Sequence[list[int]]) -> list[SampledTurn]:
        width = max(map(len, prompts))
        generated = self.model.generate(
            input_ids=torch.tensor([[self._pad] * (width - len(ids)) + ids for ids in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=_MAX_TOKENS,
            eos_token_id=self._end,
            pad_token_id=self._pad,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logprobs_BTV = torch.log_softmax(torch.stack(generated.logits, 1), -1)
        turns = []
        for row, (prompt, ids) in enumerate(zip(prompts, generated.sequences[:, width:].tolist(), strict=True)):
            reply = ids[: ids.index(self._end) + 1] if self._end in ids else ids
            turns.append(SampledTurn(prompt, reply, [float(logprobs_BTV[row, at, i]) for at, i in enumerate(reply)]))
        return turns


def _go_on(attempt: Attempt, reply: str) -> None:
    """Add a reply to an attempt: the tool's result follows, or the attempt has its reward."""
    if (code := _called(reply)) is None:
        numbers = re.findall(r"-?\d+", reply)
        attempt.reward = float(bool(numbers) and numbers[-1] == str(attempt.asked.answer))
        return
    found = _SUM.fullmatch(code)
    said = "error" if found is None else str(Question(int(found[1]), found[2], int(found[3])).answer)
    attempt.messages += [call(code), {"role": "tool", "content": said}]


def _called(reply: str) -> str | None:
    """The code of the reply's call; None if it calls nothing, or engines would not understand it."""
    if (found := _CALL.search(reply)) is None:
        return None
    try:
        return str(json.loads(found[1])["arguments"]["code"])
    except (ValueError, KeyError, TypeError):
        return None


def _with_objects(message: Message) -> dict[str, Any]:
    """The message as engines give it to the template: arguments as an object."""
    parsed: dict[str, Any] = dict(message)
    if calls := parsed.get("tool_calls"):
        functions = [each["function"] for each in calls]
        objects = [{**function, "arguments": json.loads(function["arguments"])} for function in functions]
        parsed["tool_calls"] = [{"type": "function", "function": function} for function in objects]
    return parsed
