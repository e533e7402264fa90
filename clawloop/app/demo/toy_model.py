"""Makes a toy's model with which `clawloop demo run --environment NAME` begins, and measures it in this process.

The tokenizer has each digit as a token, and each text that never varies, such as the list of tools, as one. The same
seed, machine and thread count give the same weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from clawloop.app.demo.card import CARD, Cost, digest
from clawloop.app.demo.local_model import LocalModel, SampledTurn
from clawloop.app.demo.pretrain import Encoded, Plan, Progress, fit
from clawloop.app.demo.toys import Attempted, Toy
from clawloop.app.demo.vocabulary import END, START, write_vocabulary
from clawloop.app.local import tiny_model
from clawloop.core.contracts.turns import Message
from clawloop.environments.task import AgentLoop

# Pretraining ----------------------------------------------------------------------------------------------------------

_VOCABULARY_CONVERSATIONS = 3000
# Words with the space before them; single digits, each a token; line breaks.
_WORDS = r" ?\p{L}+|\p{N}|[\r\n]| ?[^\s\p{L}\p{N}]+|\s+"


def plan_of(toy: Toy, seed: int = 0, steps: int | None = None) -> Plan:
    return Plan(seed=seed, steps=steps or toy.steps, lessons=toy.lessons)


def pretrain_toy(toy: Toy, folder: Path, plan: Plan, report: Callable[[Progress], None]) -> None:
    """Train the model and write its files to an existing folder."""
    tools = tool_list(toy.agent)
    tokenizer = _train_vocabulary(toy, tools, plan.seed)
    write_vocabulary(tokenizer, folder)
    lessons = (encode(messages, tools, tokenizer) for messages in toy.conversations(plan.seed))
    fit(folder, tokenizer, lessons, plan, report)


def segments(messages: Sequence[Message], tools: str) -> list[tuple[str, bool]]:
    """The conversation in pieces as the chat template renders it; True for those that the model writes."""
    pieces: list[tuple[str, bool]] = [(f"{START}system\n{tools}{END}\n", False)]
    for message in messages:
        content = str(message["content"] or "")
        if message["role"] == "assistant":
            calls = "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in _calls(message))
            pieces += [(f"{START}assistant\n", False), (f"{content}{calls}{END}", True), ("\n", False)]
        elif message["role"] == "tool":
            pieces.append((f"{START}user\n<tool_response>\n{content}\n</tool_response>{END}\n", False))
        else:
            pieces.append((f"{START}user\n{content}{END}\n", False))
    return pieces


def encode(messages: Sequence[Message], tools: str, tokenizer: Tokenizer) -> Encoded:
    """Tokenize a conversation; all of the assistant's messages are targets."""
    tokens: list[int] = []
    replies: list[tuple[int, int]] = []
    for text, learned in segments(messages, tools):
        begin = len(tokens)
        tokens += tokenizer.encode(text, add_special_tokens=False).ids
        if learned:
            replies.append((begin, len(tokens)))
    return Encoded(tokens, replies, [[1.0] * (end - begin) for begin, end in replies])


def tool_list(agent: AgentLoop) -> str:
    """The chat template's text for the environment's tool: the whole first message."""
    template = Path(tiny_model.__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)
    asked = [{"role": "user", "content": ""}]
    text: str = empty.apply_chat_template(asked, tools=[agent.tool], tokenize=False)
    return text.removeprefix(f"{START}system\n").partition(END)[0]


def _calls(message: Message) -> Iterator[str]:
    """The calls of a message as JSON, as the template writes them."""
    calls: Any = message.get("tool_calls")
    for each in calls or []:
        function = each["function"]
        yield f'{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}'


def _train_vocabulary(toy: Toy, tools: str, seed: int) -> Tokenizer:
    conversations = islice(toy.conversations(seed), _VOCABULARY_CONVERSATIONS)
    texts = (
        "\n".join(f"{message['role']}\n{message['content'] or toy.argument_of(message)}" for message in messages)
        for messages in conversations
    )
    fixed = [*tiny_model.MARKUP_TOKENS, tools, *toy.fixed]
    return tiny_model.train_tokenizer(texts, toy.vocabulary, fixed, _WORDS)


# Attempts in this process ---------------------------------------------------------------------------------------------

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(slots=True)
class Attempt:
    """
    Args:
        last: the reply that called nothing; None while it goes on, or if there was none.
    """

    now: Attempted
    messages: list[Message]
    turns: list[SampledTurn] = field(default_factory=list)
    last: str | None = None
    reward: float = 0.0


class ToyModel(LocalModel):
    """
    Args:
        folder: a checkpoint in Hugging Face's format; the toy's own if left out.
    """

    def __init__(self, toy: Toy, folder: Path | None = None) -> None:
        super().__init__(folder or toy.folder)
        self._toy = toy

    def attempts(self, tasks: Sequence[str]) -> list[Attempt]:
        """One attempt at each, by the environment's rules; sampled at temperature 1."""
        begun = map(self._toy.begin, tasks)
        made = [Attempt(now, [{"role": "user", "content": self._toy.asked(now.task)}]) for now in begun]
        for _ in range(self._toy.agent.turns):
            if not (going := [attempt for attempt in made if attempt.last is None]):
                break
            self._turn(going)
        for attempt in made:
            if attempt.last is not None:
                attempt.reward = float(self._toy.is_right(attempt.now.task, attempt.now.files, attempt.last))
        return made

    def success(self, tasks: Sequence[str]) -> float:
        """Share of the tasks that one attempt at each solves."""
        return sum(attempt.reward for attempt in self.attempts(tasks)) / len(tasks)

    def prompt_of(self, messages: Sequence[Message]) -> list[int]:
        """Tokenize a conversation, with the environment's tool and the beginning of a reply."""
        return self.prompt_ids([_with_objects(message) for message in messages], [self._toy.agent.tool])

    def _turn(self, going: Sequence[Attempt]) -> None:
        """One reply each: the tool's result follows, or the attempt has ended."""
        calling: list[tuple[Attempt, str]] = []
        prompts = [self.prompt_of(attempt.messages) for attempt in going]
        for attempt, turn in zip(going, self.sample(prompts, 1.0, self._toy.max_tokens), strict=True):
            attempt.turns.append(turn)
            reply = self.text(turn.response_ids)
            if (argument := _called(reply, self._toy.agent.argument)) is None:
                attempt.last = reply
            else:
                calling.append((attempt, argument))
        printed = self._toy.run([attempt.now for attempt, _ in calling], [argument for _, argument in calling])
        for (attempt, argument), output in zip(calling, printed, strict=True):
            attempt.messages += [self._toy.call(argument), {"role": "tool", "content": output}]


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


# Card -----------------------------------------------------------------------------------------------------------------


def write_toy_card(toy: Toy, folder: Path, plan: Plan, cost: Cost, success: float, tasks: int) -> None:
    """Write how the model was made, its measured success and the digest of its weights.

    Args:
        success: share of the first held-out tasks, `tasks` of them, that it solves.
    """
    size = sum(path.stat().st_size for path in folder.iterdir() if path.name != CARD)
    (folder / CARD).write_text(
        f"""\
# Clawloop's {toy.environment} model

A toy language model of the Qwen3 architecture for `make demo ARGS="--environment {toy.environment}"`: {plan.layers} \
layers of width {plan.hidden}, {size / 1e6:.1f} MB in all, weights stored in float16 and read as float32. It knows \
{toy.knows}, and it is of no use outside the demo.

It is of middling skill on purpose. The scripts it was trained on {toy.skill}. So a right episode is among what \
it samples, and rollouts show it which.

## How it was made

From random weights by `clawloop demo pretrain --environment {toy.environment}`: {plan.steps} steps of {plan.lessons} \
lessons, seed {plan.seed}, in {cost}. All text is made by `clawloop/app/demo/toys.py`, from training tasks only. The \
environment's list of tools is one token of this model's vocabulary, so after a change to it the model has to be made \
anew.

## What was measured

Success on the first {tasks} held-out tasks, one attempt each at temperature 1, with what it calls for run in the same \
process or in one sandbox for all: {success:.2f}

Weights: SHA-256 `{digest(folder)}`
""",
        encoding="utf-8",
    )
