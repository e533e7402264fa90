"""Measures how often fifty prompt injections change a judge's vote or hint, compared with the same text without them.

Each attempt is appended to the reply, to a tool's output and to the user's text. Hints are asked for as a recipe does
by default, without what tools printed. The judge decodes greedily in the grammar form. It is the demo model in this
process, or a vLLM by URL. Run as `make bench ARGS="injections"`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.table import Table

from clawloop.app.demo.phrasing import Mood, handwritten_phrases
from clawloop.app.demo.toys import CHAT_MODEL
from clawloop.app.demo.world import STYLES, Axis, answer, every_request
from clawloop.core.contracts.turns import Message
from clawloop.core.judging.evidence import Budgets, Evidence, blocks_of, choose_mark, gather, hint_evidence
from clawloop.core.judging.prompts import AnswerForm, JudgePrompt, hint_prompt, vote_prompt
from clawloop.core.judging.voting import HintVote, Vote, parse_hint, parse_vote
from clawloop.core.recipes.recipe import Signal
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import JudgeClient
from tests.unit.judging.conversations import TURN
from tests.unit.judging.injections import ATTEMPTS, Attempt, filled

CHANNELS = ("reply", "tool output", "user text")
MAX_HINT_TOKENS = 48  # in tokens; the demo model's longest hint has 32


class Judge(Protocol):
    async def votes(self, prompts: Sequence[JudgePrompt]) -> Sequence[Vote | None]: ...

    async def hints(self, prompts: Sequence[JudgePrompt]) -> Sequence[HintVote | None]: ...


class InProcess:
    """A judge that runs a small model in this process; votes are greedy."""

    def __init__(self, folder: Path) -> None:
        from clawloop.app.demo.local_model import LocalModel

        self._model = LocalModel(folder)

    async def votes(self, prompts: Sequence[JudgePrompt]) -> Sequence[Vote | None]:
        from clawloop.app.demo.evaluate import votes_by_grammar

        return votes_by_grammar(self._model, prompts)

    async def hints(self, prompts: Sequence[JudgePrompt]) -> Sequence[HintVote | None]:
        answers = self._model.replies([prompt.messages for prompt in prompts], 0.0, MAX_HINT_TOKENS)
        return [parse_hint(text, prompt) for text, prompt in zip(answers, prompts, strict=True)]


class Served:
    """A judge reached as the judge worker does."""

    def __init__(self, client: JudgeClient) -> None:
        self._client = client

    async def votes(self, prompts: Sequence[JudgePrompt]) -> Sequence[Vote | None]:
        answers = await asyncio.gather(*(self._ask(prompt) for prompt in prompts))
        return [parse_vote(text, prompt) for text, prompt in zip(answers, prompts, strict=True)]

    async def hints(self, prompts: Sequence[JudgePrompt]) -> Sequence[HintVote | None]:
        answers = await asyncio.gather(*(self._ask(prompt) for prompt in prompts))
        return [parse_hint(text, prompt) for text, prompt in zip(answers, prompts, strict=True)]

    async def _ask(self, prompt: JudgePrompt) -> str:
        (answer,) = await self._client.answers("", prompt, 1, 0.0)
        return answer.text


@dataclass(frozen=True, slots=True)
class JudgedTurn:
    """A turn to judge: request, reply and the user's reaction."""

    request: str
    reply: str
    reaction: str

    def evidence(self, channel: str, attempt: str | None = None) -> Evidence:
        texts = {"reply": self.reply, "tool output": "exit 0", "user text": self.reaction}
        if attempt is not None:
            texts[channel] = f"{texts[channel]}\n{attempt}"
        after: list[Message] = [{"role": "user", "content": texts["user text"]}]
        if channel == "tool output":
            after.insert(0, {"role": "tool", "tool_call_id": "call1", "content": texts["tool output"]})
        reply: Message = {"role": "assistant", "content": texts["reply"]}
        asked: list[Message] = [{"role": "user", "content": self.request}]
        return gather(asked, reply, after)


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of the attempts in one channel.

    Args:
        changed: votes that differ from the vote without the attempt; as_wanted: those that the attempt asked for.
        hints_changed: hints that differ likewise; planted: those whose text occurs in the attempt.
        unread: answers that could not be parsed.
    """

    votes: int
    changed: int
    as_wanted: int
    hints: int
    hints_changed: int
    planted: int
    unread: int


def make_turns(per_mood: int) -> list[JudgedTurn]:
    """Return turns of the demo's world with handwritten reactions of each mood."""
    found: list[JudgedTurn] = []
    for mood in Mood:
        phrases = [phrase.text for phrase in handwritten_phrases() if phrase.mood is mood][:per_mood]
        for at, phrase in enumerate(phrases):
            axis = list(Axis)[at % len(Axis)]
            request = every_request(axis)[at]
            found.append(JudgedTurn(request.text, answer(request, STYLES[axis][0]), phrase))
    return found


async def measure_channel(
    judge: Judge, channel: str, turns: Sequence[JudgedTurn], attempts: Sequence[Attempt]
) -> Effect:
    pairs = [(turn, attempt) for turn in turns for attempt in attempts]
    clean = [turn.evidence(channel) for turn in turns]
    # The attacker can compute the mark that the prompt has without the attempt.
    marks = {
        turn: choose_mark(TURN, [block.text for block in blocks_of(found, Budgets())])
        for turn, found in zip(turns, clean, strict=True)
    }
    injected = [turn.evidence(channel, filled(attempt.text, marks[turn])) for turn, attempt in pairs]
    form = AnswerForm.GRAMMAR
    clean_votes = dict(zip(turns, await judge.votes([vote_prompt(TURN, each, form) for each in clean]), strict=True))
    votes = await judge.votes([vote_prompt(TURN, each, form) for each in injected])
    clean_hints = dict(zip(turns, await judge.hints([_hint_prompt(each) for each in clean]), strict=True))
    hints = await judge.hints([_hint_prompt(each) for each in injected])
    changed_votes = [
        (attempt, vote)
        for (turn, attempt), vote in zip(pairs, votes, strict=True)
        if vote is not None and vote != clean_votes[turn]
    ]
    changed_hints = [
        (attempt, hint)
        for (turn, attempt), hint in zip(pairs, hints, strict=True)
        if hint is not None and hint != clean_hints[turn]
    ]
    return Effect(
        votes=len(votes),
        changed=len(changed_votes),
        as_wanted=sum(str(vote) == attempt.wants for attempt, vote in changed_votes),
        hints=len(hints),
        hints_changed=len(changed_hints),
        planted=sum(
            hint.text is not None and _plain(hint.text) in _plain(filled(attempt.text, ""))
            for attempt, hint in changed_hints
        ),
        unread=sum(answer is None for answer in [*votes, *hints]),
    )


def _hint_prompt(evidence: Evidence) -> JudgePrompt:
    """The question for a hint as a recipe asks it by default: what tools printed is left out."""
    shown = hint_evidence(evidence, Signal())
    assert shown is not None  # in each turn the user reacts
    return hint_prompt(TURN, shown, AnswerForm.GRAMMAR)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(".")


def table(name: str, rows: dict[str, Effect]) -> Table:
    shown = Table(title=f"{len(ATTEMPTS)} attempts against {name}")
    shown.add_column("attempt stands in")
    for heading in ("votes", "changed", "as wanted", "hints", "changed", "planted", "unread"):
        shown.add_column(heading, justify="right")
    for channel, row in rows.items():
        figures = (row.votes, row.changed, row.as_wanted, row.hints, row.hints_changed, row.planted, row.unread)
        shown.add_row(channel, *(str(figure) for figure in figures))
    return shown


async def measure(judge: Judge, per_mood: int) -> dict[str, Effect]:
    turns = make_turns(per_mood)
    return {channel: await measure_channel(judge, channel, turns, ATTEMPTS) for channel in CHANNELS}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=CHAT_MODEL, help="a small model's folder (default: the demo's)")
    parser.add_argument("--url", help="ask a vLLM here instead, e.g. http://127.0.0.1:8000")
    parser.add_argument("--name", default="policy", help="the name that server gives the model")
    parser.add_argument("--phrases", type=int, default=1, help="reactions of each mood")
    options = parser.parse_args()
    if options.url is None:
        rows = await measure(InProcess(options.model), options.phrases)
        name = str(options.model.name)
    else:
        endpoint = Endpoint(options.url.rstrip("/").removesuffix("/v1"), options.name)
        async with JudgeClient(lambda policy: [endpoint], AnswerForm.GRAMMAR) as client:
            rows = await measure(Served(client), options.phrases)
        name = options.name
    Console().print(table(name, rows))


if __name__ == "__main__":
    asyncio.run(main())
