"""Compares one direct vote with the majority of m sampled votes: agreement and cost.

All contenders judge every phrase. They take turns at being first, and only the first judgement of a phrase is timed,
because an engine caches the prompt. The judge is the demo model in this process, which reads a prompt once and decodes
its m answers as a batch, as an engine does; or a vLLM by URL. Run as `make bench ARGS="direct-vote"`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Protocol

import torch
from rich.console import Console
from rich.table import Table

from clawloop.algorithms.rewards import precision_bound
from clawloop.demo.evaluate import DemoModel, measured_lists
from clawloop.demo.examples import Lessons
from clawloop.demo.location import model_path
from clawloop.demo.phrasing import Feedback
from clawloop.judging.parsing import Vote, parse_vote
from clawloop.judging.prompts import AnswerForm, JudgePrompt
from clawloop.judging.voting import Verdict, direct_vote, majority
from clawloop.recipes.recipe import Signal
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import JudgeClient

SAMPLED = (1, 3, 5, 9)
DIRECT = 0  # the contender that samples no vote
FIRST_TOKENS: dict[Vote, str] = {1: "1", 0: "0", -1: "-"}
HEADINGS = (
    "contender",
    "right",
    "at least",  # the article's bound, from the rates of one vote
    "as the direct vote",
    "as itself again",
    "tokens read",
    "written",
    "ms, median",
    "9 of 10 below",
)


@dataclass
class Tally:
    """The judgements of one contender.

    Attributes:
        right: the verdict is the phrase's.
        with_direct: the verdict agrees with the direct vote.
        with_itself: a second judgement gives the same verdict.
        verdicts: by the phrase's vote.
        read, written: input and output tokens of a judgement; empty if the judge does not report them.
        seconds: of judgements that were the first of their phrase.
    """

    right: list[bool] = field(default_factory=list)
    with_direct: list[bool] = field(default_factory=list)
    with_itself: list[bool] = field(default_factory=list)
    verdicts: defaultdict[int, list[int | None]] = field(default_factory=lambda: defaultdict(list))
    read: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def rate(self, vote: int) -> float:
        """Return the share of this vote's phrases that got it."""
        return fmean(verdict == vote for verdict in self.verdicts[vote])


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict with its input and output tokens; None if the judge does not report them."""

    verdict: Verdict
    read: int | None = None
    written: int | None = None


class Judge(Protocol):
    async def judge(self, prompt: JudgePrompt, votes: int) -> Judged: ...


class InProcess:
    """A judge that runs a small model in this process."""

    def __init__(self, folder: Path) -> None:
        self._demo = DemoModel(folder)
        vocabulary = self._demo.tokenizer.get_vocab()
        self._choices = {vote: vocabulary[text] for vote, text in FIRST_TOKENS.items()}

    @torch.no_grad()
    async def judge(self, prompt: JudgePrompt, votes: int) -> Judged:
        ids = self._demo.prompt_ids(prompt.messages)
        out = self._demo.model(input_ids=torch.tensor([ids]), logits_to_keep=1, use_cache=True)
        logits = out.logits[0, -1, list(self._choices.values())]
        if votes == DIRECT:
            logprobs = dict(zip(self._choices, logits.log_softmax(-1).tolist(), strict=True))
            return Judged(direct_vote(logprobs), len(ids), 1)
        odds = torch.softmax(logits / Signal().judge_temperature, -1)
        places = torch.multinomial(odds, votes, replacement=True).tolist()
        drawn = [list(self._choices)[place] for place in places]
        # The grammar fixes the rest of an answer, but an engine computes each of its tokens.
        answers = [[self._choices[vote], *self._demo.reply_ids(str(vote))[1:]] for vote in drawn]
        cache = out.past_key_values
        cache.batch_repeat_interleave(votes)
        for place in range(max(map(len, answers)) - 1):
            column = [[answer[min(place, len(answer) - 1)]] for answer in answers]
            self._demo.model(input_ids=torch.tensor(column), past_key_values=cache, use_cache=True)
        return Judged(majority(drawn), len(ids), sum(map(len, answers)))


class Served:
    """A judge reached as the judge worker does."""

    def __init__(self, client: JudgeClient) -> None:
        self._client = client

    async def judge(self, prompt: JudgePrompt, votes: int) -> Judged:
        if votes == DIRECT:
            return Judged(direct_vote(await self._client.distribution("default", prompt)))
        answers = await self._client.answers("default", prompt, votes, Signal().judge_temperature)
        return Judged(majority([parse_vote(answer.text, prompt) for answer in answers]))


async def compare(judge: Judge, feedback: Sequence[Feedback], seed: int) -> dict[int, Tally]:
    lessons = Lessons(f"direct votes {seed}")
    tallies: defaultdict[int, Tally] = defaultdict(Tally)
    contenders = (DIRECT, *SAMPLED)
    for index, phrase in enumerate(feedback):
        prompt = lessons.ask_vote(phrase, AnswerForm.GRAMMAR)
        first = index % len(contenders)
        judgements: dict[int, Judged] = {}
        for votes in (*contenders[first:], *contenders[:first]):
            began = time.perf_counter()
            judgements[votes] = await judge.judge(prompt, votes)
            if len(judgements) == 1:
                tallies[votes].seconds.append(time.perf_counter() - began)
        direct = judgements[DIRECT].verdict.verdict
        for votes, judged in judgements.items():
            tally, verdict = tallies[votes], judged.verdict.verdict
            repeated = await judge.judge(prompt, votes)
            tally.right.append(verdict == phrase.vote)
            tally.with_direct.append(verdict == direct)
            tally.with_itself.append(verdict == repeated.verdict.verdict)
            tally.verdicts[phrase.vote].append(verdict)
            tally.read += [] if judged.read is None else [judged.read]
            tally.written += [] if judged.written is None else [judged.written]
    return tallies


def show(console: Console, name: str, count: int, tallies: dict[int, Tally]) -> None:
    one = tallies[1]
    rates = {"true_positive_rate": one.rate(1), "true_negative_rate": one.rate(-1)}
    table = Table(title=f"{name}: {count} phrases")
    for column in HEADINGS:
        table.add_column(column, justify="left" if column == "contender" else "right")
    for votes in (DIRECT, *SAMPLED):
        tally = tallies[votes]
        slow = sorted(tally.seconds)[int(0.9 * len(tally.seconds))]
        table.add_row(
            "direct vote" if votes == DIRECT else f"majority of {votes}",
            f"{fmean(tally.right):.3f}",
            "" if votes == DIRECT else f"{precision_bound(votes, **rates):.3f}",
            *(f"{fmean(agreed):.3f}" for agreed in (tally.with_direct, tally.with_itself)),
            *(f"{fmean(tokens):.0f}" if tokens else "" for tokens in (tally.read, tally.written)),
            f"{1000 * median(tally.seconds):.0f}",
            f"{1000 * slow:.0f}",
        )
    console.print(table)


async def measure(judge: Judge, phrases: int, seed: int) -> None:
    console = Console(width=120)
    for name, feedback in measured_lists().items():
        some = Random(seed).sample(feedback, min(phrases, len(feedback)))
        await compare(judge, some[:5], seed)  # warm-up
        show(console, name, len(some), await compare(judge, some, seed))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=model_path(), help="a small model's folder (default: the demo's)")
    parser.add_argument("--url", help="ask a vLLM here instead, e.g. http://127.0.0.1:8000")
    parser.add_argument("--name", default="policy", help="the name that server gives the model")
    parser.add_argument("--phrases", type=int, default=200, help="of each list")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    if options.url is None:
        await measure(InProcess(options.model), options.phrases, options.seed)
        return
    endpoint = Endpoint(options.url.rstrip("/").removesuffix("/v1"), options.name)
    async with JudgeClient(lambda policy: [endpoint], AnswerForm.GRAMMAR) as client:
        await measure(Served(client), options.phrases, options.seed)


if __name__ == "__main__":
    asyncio.run(main())
