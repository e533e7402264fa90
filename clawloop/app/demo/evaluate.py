"""Measures a demo model in this process: its answers and its judgements.

Answers are sampled. Judgements are greedy, which approximates a majority of votes sampled at a low temperature.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from clawloop.app.demo.examples import Lessons
from clawloop.app.demo.local_model import LocalModel
from clawloop.app.demo.phrasing import MEASURED_PHRASES, Feedback, Mood, handwritten_phrases, held_out_phrases
from clawloop.app.demo.world import HINTS, STYLES, Axis, Request, answer, every_request, style_of
from clawloop.core.contracts.turns import Message
from clawloop.core.judging.hints import with_hint
from clawloop.core.judging.prompts import AnswerForm, JudgePrompt
from clawloop.core.judging.voting import Vote, parse_hint, parse_vote

_MAX_ANSWER_TOKENS = 96  # the longest right answer has about 70
_VOTES: tuple[Vote, ...] = (1, 0, -1)
_STYLE_OF_HINT = {texts[0]: style for style, texts in HINTS.items()}


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """Shares of `count` sampled answers.

    Args:
        first_style: axis → share in the first style of the axis; the rest should be in the second.
        hint_followed: share in the hinted style, half of the hints for each style of the axis.
    """

    temperature: float
    count: int
    exact: float
    first_style: dict[str, float]
    hint_followed: float
    exact_with_hint: float


@dataclass(frozen=True, slots=True)
class JudgeFigures:
    """Shares over one list of phrases.

    Args:
        vote: right votes.
        by_mood: mood → right votes among its phrases.
        unreadable_as_bad: unreadable phrases with vote −1.
        hint: wishes with a hint for the right style.
        no_hint: other phrases without a hint.
        wrong: phrases with a wrong vote, and that vote.
    """

    phrases: int
    vote: float
    by_mood: dict[str, float]
    unreadable_as_bad: float
    hint: float
    no_hint: float
    wrong: tuple[tuple[str, int | None], ...]


def measure_answers(model: LocalModel, temperature: float, per_axis: int = 100, seed: int = 0) -> AnswerFigures:
    """Sample answers to requests without and with a hint and grade them."""
    torch.manual_seed(seed)
    rng = random.Random(f"answers {seed}")
    requests = [request for axis in Axis for request in rng.sample(every_request(axis), per_axis)]
    replies = model.replies([_chat(request) for request in requests], temperature, _MAX_ANSWER_TOKENS)
    target_styles = [STYLES[request.axis][at % 2] for at, request in enumerate(requests)]
    hinted = [_chat(request, rng.choice(HINTS[style])) for request, style in zip(requests, target_styles, strict=True)]
    hinted_replies = model.replies(hinted, temperature, _MAX_ANSWER_TOKENS)
    followed = [style_of(reply) is style for reply, style in zip(hinted_replies, target_styles, strict=True)]
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
        exact_with_hint=_share(_exact(request, reply) for request, reply in zip(requests, hinted_replies, strict=True)),
    )


def measure_judge(model: LocalModel, feedback: Sequence[Feedback], form: AnswerForm, seed: int = 0) -> JudgeFigures:
    """Judge a list of phrases, each as feedback in a generated chat, and grade the votes and hints."""
    lessons = Lessons(f"judge {seed}")
    vote_prompts = [lessons.ask_vote(each, form) for each in feedback]
    votes: list[Vote | None] = list(votes_by_grammar(model, vote_prompts)) if form is AnswerForm.GRAMMAR else []
    if form is AnswerForm.FREE:
        answers = model.replies([prompt.messages for prompt in vote_prompts], 0.0, 24)
        votes = [parse_vote(text, prompt) for text, prompt in zip(answers, vote_prompts, strict=True)]
    hint_prompts = [lessons.ask_hint(each, form) for each in feedback]
    texts = model.replies([prompt.messages for prompt in hint_prompts], 0.0, 32)
    hints = [parse_hint(text, prompt) for text, prompt in zip(texts, hint_prompts, strict=True)]
    styles = [
        "none" if hint is None else None if hint.text is None else _STYLE_OF_HINT.get(hint.text, "none")
        for hint in hints
    ]
    right = [vote == each.vote for vote, each in zip(votes, feedback, strict=True)]
    by_mood = {mood: [at for at, each in enumerate(feedback) if each.mood is mood] for mood in Mood}
    return JudgeFigures(
        phrases=len(feedback),
        vote=_share(right),
        by_mood={mood.value: _share(right[at] for at in indices) for mood, indices in by_mood.items()},
        unreadable_as_bad=_share(votes[at] == -1 for at in by_mood[Mood.UNREADABLE]),
        hint=_share(styles[at] == feedback[at].style for at in by_mood[Mood.WISHED]),
        no_hint=_share(styles[at] is None for at, each in enumerate(feedback) if each.mood is not Mood.WISHED),
        wrong=tuple((each.text, vote) for each, vote in zip(feedback, votes, strict=True) if vote != each.vote),
    )


def votes_by_grammar(model: LocalModel, prompts: Sequence[JudgePrompt]) -> list[Vote]:
    """For each prompt the likeliest of the three answers that the grammar allows."""
    vocabulary = model.tokenizer.get_vocab()
    firsts = [vocabulary[text] for text in ("1", "0", "-")]
    logits = model.next_logits([model.prompt_ids(prompt.messages) for prompt in prompts])
    return [_VOTES[int(at)] for at in logits[:, firsts].argmax(-1)]


def measured_lists() -> dict[str, tuple[Feedback, ...]]:
    """Return the three lists of phrases that the judge is measured on; training uses none of them."""
    return {
        "held-out phrases": held_out_phrases("phrase", MEASURED_PHRASES),
        "held-out patterns": held_out_phrases("pattern", MEASURED_PHRASES),
        "our own list": handwritten_phrases(),
    }


def _chat(request: Request, hint: str | None = None) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": request.text}]
    if hint is None:
        return messages
    hinted = with_hint(messages, hint)
    assert hinted is not None  # the last message is a user's text
    return hinted


def _exact(request: Request, reply: str) -> bool:
    return reply in (answer(request, style) for style in STYLES[request.axis])


def _share(values: Iterable[bool]) -> float:
    flags = list(values)
    return sum(flags) / len(flags) if flags else float("nan")
