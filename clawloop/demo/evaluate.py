"""What a demo model can do, in figures.

Knows nothing about how it was made. Answers are sampled; the judge is read greedily, which is what a majority of
votes sampled at a low temperature comes to.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from clawloop.contracts.turns import Message
from clawloop.demo.examples import Lessons
from clawloop.demo.hints import HINTS
from clawloop.demo.phrasing import MEASURED_PHRASES, Feedback, Mood, held_out_phrases, holdout_phrases_by_hand
from clawloop.demo.vocabulary import END, PAD
from clawloop.demo.world import STYLES, Axis, Request, answer, every_request, style_of
from clawloop.judging.hints import with_hint
from clawloop.judging.parsing import Vote, parse_hint, parse_vote
from clawloop.judging.prompts import AnswerForm, JudgePrompt

_AT_ONCE = 64  # prompts in one forward: a few hundred tokens each
_LONGEST_ANSWER = 96  # tokens; the longest right one has about 70
Prompt = TypeVar("Prompt")
_VOTES: tuple[Vote, ...] = (1, 0, -1)
_STYLE_OF_HINT = {texts[0]: style for style, texts in HINTS.items()}


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """Shares, each of `count` sampled answers.

    Args:
        first_style: axis → how many are in the first style of the axis; the others should be in the second.
        hint_followed: with a hint for either style of the axis.
    """

    temperature: float
    count: int
    exact: float
    first_style: dict[str, float]
    hint_followed: float
    exact_with_hint: float


@dataclass(frozen=True, slots=True)
class JudgeFigures:
    """Shares, for one list of phrases.

    Args:
        by_mood: mood → right votes among its phrases.
        unreadable_as_bad: of phrases that say nothing, those called bad.
        hint: of wishes, those whose hint names the right style.
        no_hint: of all others, those without a hint.
        wrong: phrases with a wrong vote, and that vote.
    """

    phrases: int
    vote: float
    by_mood: dict[str, float]
    unreadable_as_bad: float
    hint: float
    no_hint: float
    wrong: tuple[tuple[str, int | None], ...]


class DemoModel:
    """The model in this process.

    Args:
        folder: in Hugging Face's form.
    """

    def __init__(self, folder: Path):
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
        self.model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._end = self.tokenizer.convert_tokens_to_ids(END)
        self._pad = self.tokenizer.convert_tokens_to_ids(PAD)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """A chat as ids, up to where the assistant speaks."""
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @torch.no_grad()
    def replies(self, chats: Sequence[Sequence[Message]], temperature: float, longest: int) -> list[str]:
        """One reply to each chat; temperature 0 is greedy."""
        found: list[str] = []
        for some in _batches(chats):
            ids_BL, mask_BL = self._left_padded([self.prompt_ids(chat) for chat in some])
            sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
            out_BL = self.model.generate(
                input_ids=ids_BL,
                attention_mask=mask_BL,
                do_sample=temperature > 0,
                max_new_tokens=longest,
                eos_token_id=self._end,
                pad_token_id=self._pad,
                **sampling,
            )
            for row in out_BL[:, ids_BL.shape[1] :].tolist():
                reply = row[: row.index(self._end)] if self._end in row else row
                found.append(self.tokenizer.decode(reply))
        return found

    def reply_ids(self, reply: str) -> list[int]:
        """A reply as ids, with the end of the turn."""
        ids: list[int] = self.tokenizer(reply, add_special_tokens=False)["input_ids"]
        return [*ids, self._end]

    def votes(self, prompts: Sequence[JudgePrompt]) -> list[Vote]:
        """The likeliest of the three answers a grammar allows."""
        return [_VOTES[int(at)] for at in self._vote_logits(prompts).argmax(-1)]

    def sampled_votes(self, prompt: JudgePrompt, count: int, temperature: float) -> list[Vote]:
        """That many votes, as an engine samples them under the grammar."""
        odds = torch.softmax(self._vote_logits([prompt])[0] / temperature, -1)
        return [_VOTES[int(at)] for at in torch.multinomial(odds, count, replacement=True)]

    @torch.no_grad()
    def _vote_logits(self, prompts: Sequence[JudgePrompt]) -> Tensor:
        """Of the three answers' first tokens: [prompts, 3]."""
        vocabulary = self.tokenizer.get_vocab()
        firsts = [vocabulary[text] for text in ("1", "0", "-")]
        found = []
        for some in _batches(prompts):
            ids_BL, mask_BL = self._left_padded([self.prompt_ids(prompt.messages) for prompt in some])
            logits_BV = self.model(input_ids=ids_BL, attention_mask=mask_BL, logits_to_keep=1).logits[:, -1]
            found.append(logits_BV[:, firsts])
        return torch.cat(found)

    def _left_padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, prompts))
        ids_BL = torch.tensor([[self._pad] * (longest - len(ids)) + list(ids) for ids in prompts])
        mask_BL = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        return ids_BL, mask_BL


def measure_answers(model: DemoModel, temperature: float, per_axis: int = 100, seed: int = 0) -> AnswerFigures:
    """Sampled answers to requests alone, and with a hint for either style."""
    torch.manual_seed(seed)
    chance = random.Random(f"answers {seed}")
    requests = [request for axis in Axis for request in chance.sample(every_request(axis), per_axis)]
    replies = model.replies([_chat(request) for request in requests], temperature, _LONGEST_ANSWER)
    wanted = [STYLES[request.axis][at % 2] for at, request in enumerate(requests)]
    hinted = [_chat(request, chance.choice(HINTS[style])) for request, style in zip(requests, wanted, strict=True)]
    led = model.replies(hinted, temperature, _LONGEST_ANSWER)
    followed = [style_of(reply) is style for reply, style in zip(led, wanted, strict=True)]
    first = {
        axis.value: _share(
            style_of(reply) is STYLES[axis][0]
            for request, reply in zip(requests, replies, strict=True)
            if request.axis is axis
        )
        for axis in Axis
    }
    return AnswerFigures(
        temperature=temperature,
        count=len(requests),
        exact=_share(_exact(request, reply) for request, reply in zip(requests, replies, strict=True)),
        first_style=first,
        hint_followed=_share(followed),
        exact_with_hint=_share(_exact(request, reply) for request, reply in zip(requests, led, strict=True)),
    )


def measure_judge(model: DemoModel, feedback: Sequence[Feedback], form: AnswerForm, seed: int = 0) -> JudgeFigures:
    """Votes and hints on a list of phrases, each after some reply in some chat."""
    lessons = Lessons(f"judge {seed}")
    asked = [lessons.ask_vote(each, form) for each in feedback]
    votes: list[Vote | None] = list(model.votes(asked)) if form is AnswerForm.GRAMMAR else []
    if form is AnswerForm.FREE:
        answers = model.replies([prompt.messages for prompt in asked], 0.0, 24)
        votes = [parse_vote(text, prompt) for text, prompt in zip(answers, asked, strict=True)]
    questions = [lessons.ask_hint(each, form) for each in feedback]
    texts = model.replies([prompt.messages for prompt in questions], 0.0, 32)
    hints = [parse_hint(text, prompt) for text, prompt in zip(texts, questions, strict=True)]
    styles = [
        "none" if hint is None else None if hint.text is None else _STYLE_OF_HINT.get(hint.text, "none")
        for hint in hints
    ]
    right = [vote == each.vote for vote, each in zip(votes, feedback, strict=True)]
    moods = {mood: [at for at, each in enumerate(feedback) if each.mood is mood] for mood in Mood}
    return JudgeFigures(
        phrases=len(feedback),
        vote=_share(right),
        by_mood={mood.value: _share(right[at] for at in places) for mood, places in moods.items()},
        unreadable_as_bad=_share(votes[at] == -1 for at in moods[Mood.UNREADABLE]),
        hint=_share(styles[at] == feedback[at].style for at in moods[Mood.WISHED]),
        no_hint=_share(styles[at] is None for at, each in enumerate(feedback) if each.mood is not Mood.WISHED),
        wrong=tuple((each.text, vote) for each, vote in zip(feedback, votes, strict=True) if vote != each.vote),
    )


def measured_lists() -> dict[str, tuple[Feedback, ...]]:
    """The three lists the judge is measured on; no phrase of them was trained on."""
    return {
        "held-out phrases": held_out_phrases("phrase", MEASURED_PHRASES),
        "held-out patterns": held_out_phrases("pattern", MEASURED_PHRASES),
        "our own list": holdout_phrases_by_hand(),
    }


def _chat(request: Request, hint: str | None = None) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": request.text}]
    if hint is None:
        return messages
    hinted = with_hint(messages, hint)
    assert hinted is not None  # the message is a user's text
    return hinted


def _exact(request: Request, reply: str) -> bool:
    return reply in (answer(request, style) for style in STYLES[request.axis])


def _batches(prompts: Sequence[Prompt]) -> Iterator[Sequence[Prompt]]:
    return (prompts[at : at + _AT_ONCE] for at in range(0, len(prompts), _AT_ONCE))


def _share(values: Iterable[bool]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else float("nan")
