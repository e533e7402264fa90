"""Pretrains a toy, with which `clawloop demo run --environment NAME` begins.

The tokenizer has each digit as a token, and each text that never varies, such as the list of tools, as one. The same
seed, machine and thread count give the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from clawloop.app.demo.packing import Encoded, Pack, pack
from clawloop.app.demo.practice.toy import Course, Toy
from clawloop.app.demo.pretrain import Plan, Progress, fit
from clawloop.app.demo.vocabulary import END, PAD, START, write_vocabulary
from clawloop.app.local import tiny_model
from clawloop.core.contracts.turns import Message
from clawloop.environments.task import AgentLoop

_VOCABULARY_CONVERSATIONS = 3000
# Words with the space before them; single digits, each a token; line breaks.
_WORDS = r" ?\p{L}+|\p{N}|[\r\n]| ?[^\s\p{L}\p{N}]+|\s+"


def plan_of(course: Course, seed: int = 0, steps: int | None = None) -> Plan:
    return Plan(seed=seed, steps=steps or course.steps, lessons=course.lessons)


def pretrain_toy(toy: Toy, folder: Path, plan: Plan, report: Callable[[Progress], None]) -> None:
    """Train the model and write its files to an existing folder."""
    tools = tool_list(toy.simulate().agent)
    tokenizer = _train_vocabulary(toy.course, tools, plan.seed)
    write_vocabulary(tokenizer, folder)
    fit(folder, tokenizer, _packs(toy.course, tools, plan, tokenizer), plan, report)


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
    calls = message.get("tool_calls")
    for each in calls if isinstance(calls, list) else []:
        assert isinstance(each, dict)
        function = each["function"]
        assert isinstance(function, dict)
        yield f'{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}'


def _packs(course: Course, tools: str, plan: Plan, tokenizer: Tokenizer) -> Iterator[Pack]:
    lessons = course.conversations(plan.seed)
    while True:
        yield pack([encode(messages, tools, tokenizer) for messages in islice(lessons, plan.lessons)])


def _train_vocabulary(course: Course, tools: str, seed: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    fixed = [*tiny_model.MARKUP_TOKENS, tools, *course.fixed]
    trainer = trainers.BpeTrainer(
        vocab_size=course.vocabulary - len(fixed),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lessons = islice(course.conversations(seed), _VOCABULARY_CONVERSATIONS)
    tokenizer.train_from_iterator(map(course.texts, lessons), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in fixed])
    return tokenizer
