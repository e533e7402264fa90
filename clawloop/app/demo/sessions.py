"""The user's side of a run, over HTTP: sessions of chat, and the measuring of a version.

`ToyUser` chats with the toy and knows the right answer of each request. `TasteUser` chats with any model, and grades by
the rule of a taste and by facts that the base model knew.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol, TypeVar

from openai.types.chat import ChatCompletionMessageParam

from clawloop.app.demo.openai_client import ChatClient
from clawloop.app.demo.tastes import (
    HELD_OUT,
    LEAST_TOLD,
    Answer,
    Person,
    Taste,
    is_loop,
    share_met,
    tastes_to_learn,
    told,
)
from clawloop.app.demo.user import SyntheticUser
from clawloop.app.demo.world import EVALUATION, Axis, Grade, draw_preference, flipped, grade
from clawloop.core.errors import SetupError
from clawloop.core.gate.checks import is_right
from clawloop.core.gate.general import (
    ANSWER_TOKENS,
    KNOWN_ANSWERS,
    KNOWN_TEMPERATURE,
    GeneralQuestion,
    general_questions,
)

# An engine takes 56 chats at once, and the more are computed together the less each costs.
_CONCURRENT_REQUESTS = 32
# A style that is never sampled cannot be learned: at the policy's 0.6 the disliked style dies out, and after a flip
# none of 60 answers matched the new preference within 96 interactions.
CHAT_TEMPERATURE = 1.0

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Scores:
    """Measurements of one version.

    Args:
        match: share of replies as the user likes them; exact: share of answers with the right content.
        requests: number of replies that `match` is of.
        words: mean length of these replies; cut: share that the limit of tokens ended; loops: number that say the same
            again and again. None where they are not counted.
    """

    match: float
    exact: float
    requests: int
    words: float | None = None
    cut: float | None = None
    loops: int | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """A held-out request, with the reply of the base model and that of the last version."""

    request: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class TasteFindings:
    """Findings of a run with a taste, beside its evaluations.

    Args:
        taste: its name; rule: what the rule asks for, for people.
        notes: the frozen model, with all that the user said of replies in its system prompt: what a product that keeps
            notes does instead of learning.
        note_lines: lines of that prompt.
        told: by taste that was tried, in the drawn order, the share of 16 replies that meet it when the base model is
            told. The user's is the one that gains most.
        tastes: by every taste, the shares of the held-out replies that meet it before and after: what changes though
            nobody asked for it shows in the others.
    """

    taste: str
    rule: str
    notes: Scores
    note_lines: int
    examples: tuple[Example, ...]
    told: dict[str, float] = field(default_factory=dict)
    tastes: dict[str, tuple[float, float]] = field(default_factory=dict)


class UserSide(Protocol):
    """A user of one run.

    Args:
        concurrent: sessions at a time.
        wait_seconds: how long the user waits until turns are learned.
    """

    concurrent: int
    wait_seconds: float

    def session_requests(self, number: int) -> int:
        """Requests of the session with this number."""

    async def chat(self, client: ChatClient, number: int, name: str, requests: int, count: Callable[[], None]) -> None:
        """Chat for one session. The last reply gets no reaction in words.

        Args:
            number: from 1, of the run's sessions.
            name: unique for the key.
            count: called before each request is sent.
        """

    async def measure(self, client: ChatClient, model: str, *, thorough: bool) -> Scores:
        """Ask one version the fixed requests, each as a side turn in its own session.

        Args:
            model: the version's served name; first of all the base model's.
            thorough: ask more of them, as of the first and of the last version.

        Raises:
            ModelGone, SetupError: as `ChatClient.send_side_turn`.
        """


# The toy --------------------------------------------------------------------------------------------------------------


class ToyUser:
    """A user of the toy, whose preference the seed draws."""

    concurrent = 2
    # Judging, a step and publishing take seconds, and a part that is away delays them.
    wait_seconds = 300.0

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.preference = draw_preference(seed)

    def flip(self, axes: Collection[Axis]) -> None:
        """Prefer the other style on these axes, as user and in grading."""
        self.preference = flipped(self.preference, axes)

    def session_requests(self, number: int) -> int:
        return 5

    async def chat(self, client: ChatClient, number: int, name: str, requests: int, count: Callable[[], None]) -> None:
        # One user for each session, so that messages do not depend on the order of concurrent answers.
        user = SyntheticUser(self._seed * 10_000 + number, self.preference)
        request = user.first_request()
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": request.text}]
        for sent in range(1, requests + 1):
            count()
            reply = await client.send_main_turn(messages, name, last=sent == requests, temperature=CHAT_TEMPERATURE)
            if sent < requests:
                follow_up = user.follow_up(request, reply.text)
                messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": follow_up.text}]
                request = follow_up.request

    async def measure(self, client: ChatClient, model: str, *, thorough: bool) -> Scores:
        async def ask(number: int) -> Grade:
            request = EVALUATION[number]
            reply = await client.send_side_turn(request.text, model, f"evaluation-{model}-{number}")
            return grade(request, reply.text, self.preference)

        grades = await results_of(ask, range(len(EVALUATION)))
        return Scores(
            match=fmean(grade.match for grade in grades),
            exact=fmean(grade.exact for grade in grades),
            requests=len(EVALUATION),
        )


# Any model ------------------------------------------------------------------------------------------------------------

FEW_REQUESTS, MANY_REQUESTS = 16, 32
MOST_FACTS = 40
SHOWN_EXAMPLES = 3
_NOTES_LEAD_IN = "What the user said about earlier replies, to be followed from now on:"


def as_notes(said: Iterable[str]) -> str:
    """The system prompt of a product that keeps what users say as notes, instead of learning."""
    return "\n".join([_NOTES_LEAD_IN, *(f"- {one}" for one in said)])


class TasteUser:
    """A user of any model, with a taste that is drawn once the base model's replies are known.

    Args:
        say: prints a line.
    """

    concurrent = 4
    # A step of a model of 135M parameters takes a minute or two of two cores that serve as well.
    wait_seconds = 1200.0

    def __init__(self, seed: int, say: Callable[[str], None]) -> None:
        self._seed = seed
        self._say = say
        self._facts: Sequence[GeneralQuestion] = ()
        self._first: Sequence[Answer] = ()
        self._newest: Sequence[Answer] = ()
        self._notes: dict[str, None] = {}
        self._taste: Taste | None = None
        self._told: dict[Taste, float] = {}

    @property
    def taste(self) -> Taste:
        assert self._taste is not None, "the base model is measured first"
        return self._taste

    def session_requests(self, number: int) -> int:
        return random.Random(f"session {self._seed}-{number}").randint(2, 4)

    async def chat(self, client: ChatClient, number: int, name: str, requests: int, count: Callable[[], None]) -> None:
        person = Person(f"{self._seed}-{number}", self.taste)
        request = person.request()
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": request}]
        for sent in range(1, requests + 1):
            count()
            reply = await client.send_main_turn(messages, name, last=sent == requests)
            reaction = person.react(request, Answer(reply.text, reply.ended))
            if reaction.thumb is not None:
                await client.rate(reply, reaction.thumb)
            if sent < requests:
                if reaction.wish:
                    self._notes[reaction.wish] = None
                messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": reaction.text}]
                request = reaction.request

    async def measure(self, client: ChatClient, model: str, *, thorough: bool) -> Scores:
        if self._taste is None:
            await self._meet_base(client, model)
            return self._scores(self._first, await self._share_right(client, model))
        self._newest = await self._replies(client, model, HELD_OUT[: MANY_REQUESTS if thorough else FEW_REQUESTS])
        return self._scores(self._newest, await self._share_right(client, model))

    async def findings(self, client: ChatClient, base_model: str) -> TasteFindings:
        """Measure the notes, and gather what the run found."""
        notes = as_notes(self._notes)
        answers = await self._replies(client, base_model, HELD_OUT[:MANY_REQUESTS], notes)
        right = await self._share_right(client, base_model, notes)
        examples = zip(HELD_OUT, self._first, self._newest, strict=False)
        return TasteFindings(
            taste=self.taste,
            rule=self.taste.text,
            notes=self._scores(answers, right),
            note_lines=len(self._notes),
            examples=tuple(Example(request, before.text, after.text) for request, before, after in examples)[
                :SHOWN_EXAMPLES
            ],
            told={taste.value: share for taste, share in self._told.items()},
            tastes={each.value: (share_met(each, self._first), share_met(each, self._newest)) for each in Taste},
        )

    async def _meet_base(self, client: ChatClient, model: str) -> None:
        """Measure the base model, whose replies decide on the taste and on the facts."""
        self._first = self._newest = await self._replies(client, model, HELD_OUT[:MANY_REQUESTS])
        self._taste = await self._draw_taste(client, model)
        asked = general_questions()
        known: Sequence[GeneralQuestion] = asked
        for attempt in range(1, KNOWN_ANSWERS + 1):
            right = await self._right(client, model, known, None, attempt=attempt)
            known = [question for question, is_right in zip(known, right, strict=True) if is_right]
        if not known:
            raise SetupError("the base model answers none of the general questions: there is no content to watch")
        self._facts = random.Random("facts").sample(known, min(MOST_FACTS, len(known)))
        self._say(
            f"the user's hidden taste: {self.taste} ({self.taste.text}); the base model knows {len(known)} of"
            f" {len(asked)} general questions"
        )

    async def _draw_taste(self, client: ChatClient, model: str) -> Taste:
        """The first taste in the seed's order that words can teach this model; if there is none, the nearest to it."""
        gains: dict[Taste, float] = {}
        for taste in tastes_to_learn(self._seed, self._first):
            asked = [told(taste, number) for number in range(FEW_REQUESTS)]
            self._told[taste] = share_met(taste, await self._replies(client, model, asked, name=f"told-{taste}"))
            gains[taste] = self._told[taste] - share_met(taste, self._first[:FEW_REQUESTS])
            if gains[taste] >= LEAST_TOLD:
                break
        chosen = max(gains, key=lambda taste: gains[taste])
        for taste in (each for each in gains if each is not chosen):
            self._say(
                f"passed over: a taste for {taste} ({taste.text}), which words hardly teach this model: told so, it has"
                f" {self._told[taste]:.0%} of its replies in taste, untold {self._told[taste] - gains[taste]:.0%}"
            )
        return chosen

    def _scores(self, answers: Sequence[Answer], exact: float) -> Scores:
        return Scores(
            match=share_met(self.taste, answers),
            exact=exact,
            requests=len(answers),
            words=fmean(answer.words for answer in answers),
            cut=fmean(not answer.ended for answer in answers),
            loops=sum(is_loop(answer.text) for answer in answers),
        )

    async def _replies(
        self,
        client: ChatClient,
        model: str,
        requests: Sequence[str],
        system: str | None = None,
        name: str = "evaluation",
    ) -> Sequence[Answer]:
        async def ask(number: int) -> Answer:
            session = f"{name}-{model}-{number}"
            reply = await client.send_side_turn(requests[number], model, session, system=system)
            return Answer(reply.text, reply.ended)

        return await results_of(ask, range(len(requests)))

    async def _share_right(self, client: ChatClient, model: str, system: str | None = None) -> float:
        return fmean(await self._right(client, model, self._facts, system))

    async def _right(
        self,
        client: ChatClient,
        model: str,
        questions: Sequence[GeneralQuestion],
        system: str | None,
        attempt: int | None = None,
    ) -> list[bool]:
        """Whether each answer is right.

        Args:
            attempt: number of a sampled answer, by which it is found out what the base model knows; None: not sampled.
        """
        temperature, of_attempt = (0.0, "") if attempt is None else (KNOWN_TEMPERATURE, f"-{attempt}")

        async def ask(number: int) -> bool:
            content = questions[number].content
            text = str(content.messages[0]["content"])
            reply = await client.send_side_turn(
                text,
                model,
                f"fact-{model}-{number}{of_attempt}",
                system=system,
                temperature=temperature,
                max_tokens=ANSWER_TOKENS,
            )
            return is_right(content, reply.text) is True

        return await results_of(ask, range(len(questions)))


async def results_of(
    ask: Callable[[Item], Awaitable[Result]], items: Iterable[Item], at_once: int = _CONCURRENT_REQUESTS
) -> list[Result]:
    """The results in the items' order, a few at a time; raises what fails first."""
    slots = asyncio.Semaphore(at_once)

    async def one(item: Item) -> Result:
        async with slots:
            return await ask(item)

    asked = [asyncio.create_task(one(item)) for item in items]
    try:
        return await asyncio.gather(*asked)
    finally:
        # Otherwise the others would go on with closed clients after one of them failed.
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
