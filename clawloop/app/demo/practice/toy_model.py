"""Attempts at tasks in this process, for measuring a model before any engine runs; transformers samples replies."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from clawloop.app.demo.practice.toy import Toy, call
from clawloop.app.demo.vocabulary import END, PAD
from clawloop.core.contracts.turns import Message

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SampledTurn:
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class Attempt:
    """
    Args:
        last: the reply that called nothing; None while it goes on, or if there was none.
    """

    state: Any
    messages: list[Message]
    turns: list[SampledTurn] = field(default_factory=list)
    last: str | None = None
    reward: float = 0.0


class ToyModel:
    """
    Args:
        folder: a checkpoint in Hugging Face's format; the toy's own if left out.
    """

    def __init__(self, toy: Toy, folder: Path | None = None) -> None:
        folder = folder or toy.folder
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
        self.model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._simulation = toy.simulate()
        self._max_tokens = toy.max_tokens
        self._end = self.tokenizer.convert_tokens_to_ids(END)
        self._pad = self.tokenizer.convert_tokens_to_ids(PAD)

    def attempts(self, tasks: Sequence[str]) -> list[Attempt]:
        """One attempt at each, by the environment's rules; sampled at temperature 1."""
        begun = [self._simulation.begin(task) for task in tasks]
        made = [Attempt(state, [{"role": "user", "content": asked}]) for state, asked in begun]
        for _ in range(self._simulation.agent.turns):
            if not (going := [attempt for attempt in made if attempt.last is None]):
                break
            self._turn(going)
        ended = [attempt for attempt in made if attempt.last is not None]
        rewards = self._simulation.rewards([a.state for a in ended], [a.last or "" for a in ended])
        for attempt, reward in zip(ended, rewards, strict=True):
            attempt.reward = reward
        return made

    def success(self, tasks: Sequence[str]) -> float:
        """Share of the tasks that one attempt at each solves."""
        return sum(attempt.reward for attempt in self.attempts(tasks)) / len(tasks)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Tokenize a conversation, with the environment's tool and the beginning of a reply."""
        parsed: list[Any] = [_with_objects(message) for message in messages]
        text = self.tokenizer.apply_chat_template(
            parsed, tools=[self._simulation.agent.tool], add_generation_prompt=True, tokenize=False
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _turn(self, going: Sequence[Attempt]) -> None:
        """One reply each: the tool's result follows, or the attempt has ended."""
        agent = self._simulation.agent
        calling: list[tuple[Attempt, str]] = []
        for attempt, turn in zip(going, self._sample([self.prompt_ids(a.messages) for a in going]), strict=True):
            attempt.turns.append(turn)
            ids = turn.response_ids
            reply = self.tokenizer.decode(ids[:-1] if ids[-1] == self._end else ids)
            if (argument := _called(reply, agent.argument)) is None:
                attempt.last = reply
            else:
                calling.append((attempt, argument))
        said = self._simulation.run([attempt.state for attempt, _ in calling], [argument for _, argument in calling])
        for (attempt, argument), result in zip(calling, said, strict=True):
            attempt.messages += [
                call(agent.tool["function"]["name"], {agent.argument: argument}),
                {"role": "tool", "content": result},
            ]

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
            max_new_tokens=self._max_tokens,
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


def _called(reply: str, argument: str) -> str | None:
    """The argument of the reply's call; None if it calls nothing, or engines would not understand it."""
    if (found := _CALL.search(reply)) is None:
        return None
    try:
        return str(json.loads(found[1])["arguments"][argument])
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
