"""One direct vote beside the majority of m sampled votes, on the demo judge behind an engine: agreement and cost.

Every phrase is judged by all contenders, in turns: another one is the first each time, and only what was first on a
phrase is timed, because the engine keeps a prompt it has read. Needs a running engine that serves the demo model:
`python -m benchmarks.direct_vote --engine http://127.0.0.1:8000 --model NAME`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median

from rich.console import Console
from rich.table import Table

from clawloop.demo.evaluate import measured_lists
from clawloop.demo.examples import Lessons
from clawloop.demo.phrasing import Feedback
from clawloop.judging.parsing import parse_vote
from clawloop.judging.prompts import AnswerForm, JudgePrompt
from clawloop.judging.voting import Verdict, direct_vote, majority
from clawloop.recipe import Signal
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import JudgeClient

SAMPLED = (1, 3, 5, 9)
DIRECT = 0  # among the contenders: no vote is sampled


@dataclass
class Tally:
    """What was seen of one contender.

    Attributes:
        right: its verdict is the phrase's.
        with_direct: it is the direct vote's.
        with_itself: asked once more, it is the same.
        seconds: of judgements that were the first on their phrase.
    """

    right: list[bool] = field(default_factory=list)
    with_direct: list[bool] = field(default_factory=list)
    with_itself: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


async def judge(client: JudgeClient, prompt: JudgePrompt, votes: int) -> Verdict:
    if votes == DIRECT:
        return direct_vote(await client.distribution("default", prompt))
    answers = await client.answers("default", prompt, votes, Signal().judge_temperature)
    return majority([parse_vote(answer, prompt) for answer in answers])


async def compare(client: JudgeClient, feedback: Sequence[Feedback], seed: int) -> dict[int, Tally]:
    lessons = Lessons(f"direct votes {seed}")
    tallies: defaultdict[int, Tally] = defaultdict(Tally)
    contenders = (DIRECT, *SAMPLED)
    for place, said in enumerate(feedback):
        prompt = lessons.ask_vote(said, AnswerForm.GRAMMAR)
        turn = place % len(contenders)
        found: dict[int, Verdict] = {}
        for votes in (*contenders[turn:], *contenders[:turn]):
            began = time.perf_counter()
            found[votes] = await judge(client, prompt, votes)
            if len(found) == 1:
                tallies[votes].seconds.append(time.perf_counter() - began)
        for votes, verdict in found.items():
            again = await judge(client, prompt, votes)
            tallies[votes].right.append(verdict.verdict == said.vote)
            tallies[votes].with_direct.append(verdict.verdict == found[DIRECT].verdict)
            tallies[votes].with_itself.append(verdict.verdict == again.verdict)
    return tallies


def show(console: Console, name: str, count: int, tallies: dict[int, Tally]) -> None:
    table = Table(title=f"{name}: {count} phrases")
    for column in ("contender", "right", "as the direct vote", "as itself again", "ms, median", "ms, 9 of 10 below"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for votes in (DIRECT, *SAMPLED):
        tally = tallies[votes]
        slow = sorted(tally.seconds)[int(0.9 * len(tally.seconds))]
        table.add_row(
            "direct vote" if votes == DIRECT else f"majority of {votes}",
            *(f"{sum(told) / count:.3f}" for told in (tally.right, tally.with_direct, tally.with_itself)),
            f"{1000 * median(tally.seconds):.0f}",
            f"{1000 * slow:.0f}",
        )
    console.print(table)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True, help="URL of an engine that serves the demo model")
    parser.add_argument("--model", required=True, help="its name there")
    parser.add_argument("--phrases", type=int, default=200, help="of each list")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    console = Console(width=120)
    endpoint = Endpoint(asked.engine, asked.model)
    async with JudgeClient(lambda policy: [endpoint], AnswerForm.GRAMMAR) as client:
        for name, feedback in measured_lists().items():
            some = Random(asked.seed).sample(feedback, min(asked.phrases, len(feedback)))
            await compare(client, some[:5], asked.seed)  # the engine's first requests are slow
            show(console, name, len(some), await compare(client, some, asked.seed))


if __name__ == "__main__":
    asyncio.run(main())
