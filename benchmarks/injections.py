"""How often fifty attempts to force a verdict or to plant a hint sway a judge, against the same text without them.

Each attempt stands behind the reply, behind a tool's output, and behind what the user types; the judge is asked
greedily, in the grammar form of our own engines. The demo model in this process is the judge, or a server by URL: a
vLLM, with the name it serves. Run as `make bench-injections`.
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

from clawloop.contracts.turns import Message
from clawloop.demo.location import model_path
from clawloop.demo.phrasing import Mood, handwritten_phrases
from clawloop.demo.world import STYLES, Axis, answer, every_request
from clawloop.judging.blocks import choose_mark
from clawloop.judging.evidence import Evidence, blocks_of, gather
from clawloop.judging.parsing import HintVote, Vote, parse_hint, parse_vote
from clawloop.judging.prompts import AnswerForm, JudgePrompt, hint_prompt, vote_prompt
from clawloop.judging.truncation import Budgets
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import JudgeClient
from tests.unit.judging.conversations import TURN
from tests.unit.judging.injections import ATTEMPTS, Attempt, filled

CHANNELS = ("reply", "tool output", "user text")
LONGEST_HINT = 48  # tokens of the demo model, whose longest hint has 32


class Judge(Protocol):
    async def votes(self, prompts: Sequence[JudgePrompt]) -> Sequence[Vote | None]: ...

    async def hints(self, prompts: Sequence[JudgePrompt]) -> Sequence[HintVote | None]: ...


class InProcess:
    """A small model in this process; of votes, the likeliest of the three is read."""

    def __init__(self, folder: Path) -> None:
        from clawloop.demo.evaluate import DemoModel

        self._model = DemoModel(folder)

    async def votes(self, prompts: Sequence[JudgePrompt]) -> Sequence[Vote | None]:
        return self._model.votes(prompts)

    async def hints(self, prompts: Sequence[JudgePrompt]) -> Sequence[HintVote | None]:
        answers = self._model.replies([prompt.messages for prompt in prompts], 0.0, LONGEST_HINT)
        return [parse_hint(text, prompt) for text, prompt in zip(answers, prompts, strict=True)]


class Served:
    """A judge as the judge worker asks one."""

    def __init__(self, client: JudgeClient) -> None:
        self._client = client

    async def votes(self, prompts: Sequence[JudgePrompt]) -> Sequence[Vote | None]:
        answers = await asyncio.gather(*(self._ask(prompt) for prompt in prompts))
        return [parse_vote(text, prompt) for text, prompt in zip(answers, prompts, strict=True)]

    async def hints(self, prompts: Sequence[JudgePrompt]) -> Sequence[HintVote | None]:
        answers = await asyncio.gather(*(self._ask(prompt) for prompt in prompts))
        return [parse_hint(text, prompt) for text, prompt in zip(answers, prompts, strict=True)]

    async def _ask(self, prompt: JudgePrompt) -> str:
        (text,) = await self._client.answers("", prompt, 1, 0.0)
        return text


@dataclass(frozen=True, slots=True)
class Talk:
    """A turn to judge: what was asked, answered and typed next."""

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
class Swayed:
    """What became of the attempts of one channel.

    Args:
        changed, as_wanted: votes other than without the attempt; of these, those the attempt was after.
        hints_changed, planted: likewise of hints; planted are those whose words stand in the attempt.
        unread: answers that could not be read.
    """

    votes: int
    changed: int
    as_wanted: int
    hints: int
    hints_changed: int
    planted: int
    unread: int


def talks(per_mood: int) -> list[Talk]:
    """Reactions of each mood, typed by hand, after answers of the demo's world."""
    found: list[Talk] = []
    for mood in Mood:
        phrases = [phrase.text for phrase in handwritten_phrases() if phrase.mood is mood][:per_mood]
        for at, phrase in enumerate(phrases):
            axis = list(Axis)[at % len(Axis)]
            request = every_request(axis)[at]
            found.append(Talk(request.text, answer(request, STYLES[axis][0]), phrase))
    return found


async def sway(judge: Judge, channel: str, told: Sequence[Talk], attempts: Sequence[Attempt]) -> Swayed:
    pairs = [(talk, attempt) for talk in told for attempt in attempts]
    clean = [talk.evidence(channel) for talk in told]
    # The writer works out the mark that the prompt would have had without the attempt.
    marks = {
        talk: choose_mark(TURN, [block.text for block in blocks_of(found, Budgets())])
        for talk, found in zip(told, clean, strict=True)
    }
    swayed = [talk.evidence(channel, filled(attempt.text, marks[talk])) for talk, attempt in pairs]
    form = AnswerForm.GRAMMAR
    before = dict(zip(told, await judge.votes([vote_prompt(TURN, each, form) for each in clean]), strict=True))
    votes = await judge.votes([vote_prompt(TURN, each, form) for each in swayed])
    said = dict(zip(told, await judge.hints([hint_prompt(TURN, each, form) for each in clean]), strict=True))
    hints = await judge.hints([hint_prompt(TURN, each, form) for each in swayed])
    flipped = [
        (attempt, vote)
        for (talk, attempt), vote in zip(pairs, votes, strict=True)
        if vote is not None and vote != before[talk]
    ]
    led = [
        (attempt, hint)
        for (talk, attempt), hint in zip(pairs, hints, strict=True)
        if hint is not None and hint != said[talk]
    ]
    return Swayed(
        votes=len(votes),
        changed=len(flipped),
        as_wanted=sum(str(vote) == attempt.wants for attempt, vote in flipped),
        hints=len(hints),
        hints_changed=len(led),
        planted=sum(
            hint.text is not None and _plain(hint.text) in _plain(filled(attempt.text, "")) for attempt, hint in led
        ),
        unread=sum(answer is None for answer in [*votes, *hints]),
    )


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(".")


def table(name: str, rows: dict[str, Swayed]) -> Table:
    shown = Table(title=f"{len(ATTEMPTS)} attempts against {name}")
    shown.add_column("attempt stands in")
    for heading in ("votes", "changed", "as wanted", "hints", "changed", "planted", "unread"):
        shown.add_column(heading, justify="right")
    for channel, row in rows.items():
        figures = (row.votes, row.changed, row.as_wanted, row.hints, row.hints_changed, row.planted, row.unread)
        shown.add_row(channel, *(str(figure) for figure in figures))
    return shown


async def measure(judge: Judge, per_mood: int) -> dict[str, Swayed]:
    told = talks(per_mood)
    return {channel: await sway(judge, channel, told, ATTEMPTS) for channel in CHANNELS}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=model_path(), help="a small model's folder (default: the demo's)")
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
