"""The synthetic user's sessions, and the fixed requests by which a version is measured.

Knows nothing about training: it only talks to the gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from openai.types.chat import ChatCompletionMessageParam

from clawloop.demo.openai_client import ChatClient
from clawloop.demo.user import SyntheticUser
from clawloop.demo.world import EVALUATION, Grade, Preference, grade

# Enough to keep the engine busy; more only wait in its queue.
_ASKED_AT_ONCE = 16
# What is never said cannot be learned: at the policy's 0.6 the style that was not liked dies out, and when the taste
# flipped none of 60 answers followed it after 96 interactions.
CHAT_TEMPERATURE = 1.0


async def chat_session(
    talker: ChatClient, user: SyntheticUser, session: str, requests: int, asked: Callable[[], None]
) -> None:
    """One session: a request, then its reaction and the next request in one message, and so on.

    The last answer gets no reaction: the user closes the window.

    Args:
        session: its name, unique for the key.
        requests: how many, at least one.
        asked: told of each request before it is sent.
    """
    request = user.first_request()
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": request.text}]
    for number in range(1, requests + 1):
        asked()
        reply = await talker.say(messages, session, last=number == requests, temperature=CHAT_TEMPERATURE)
        if number < requests:
            then = user.follow_up(request, reply.text)
            messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": then.text}]
            request = then.request


@dataclass(frozen=True, slots=True)
class Measured:
    """Shares of the evaluation requests."""

    match: float
    exact: float


async def measure(talker: ChatClient, preference: Preference, model: str) -> Measured:
    """Ask one version all evaluation requests, each as a side turn in a session of its own.

    Args:
        preference: by which the answers are graded.
        model: the name the version is served under.
    """
    gate = asyncio.Semaphore(_ASKED_AT_ONCE)

    async def ask(number: int) -> Grade:
        request = EVALUATION[number]
        async with gate:
            text = await talker.ask_aside(request.text, model, f"evaluation-{model}-{number}")
        return grade(request, text, preference)

    grades = await asyncio.gather(*(ask(number) for number in range(len(EVALUATION))))
    return Measured(
        match=sum(one.match for one in grades) / len(grades), exact=sum(one.exact for one in grades) / len(grades)
    )
