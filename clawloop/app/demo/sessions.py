"""Runs the synthetic user's sessions, and evaluates a version on the fixed requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from openai.types.chat import ChatCompletionMessageParam

from clawloop.app.demo.openai_client import ChatClient
from clawloop.app.demo.user import SyntheticUser
from clawloop.app.demo.world import EVALUATION, Grade, Preference, grade
from clawloop.core.errors import SetupError

# Enough to keep the engine busy; more would only wait in its queue.
_CONCURRENT_REQUESTS = 16
# A style that is never sampled cannot be learned: at the policy's 0.6 the disliked style dies out, and after a flip
# none of 60 answers matched the new preference within 96 interactions.
CHAT_TEMPERATURE = 1.0


async def chat_session(
    client: ChatClient, user: SyntheticUser, session: str, requests: int, on_request: Callable[[], None]
) -> None:
    """Chat for one session. Each message after the first is a reaction and the next request.

    The last answer gets no reaction.

    Args:
        session: a name that is unique for the key.
        requests: number of requests, at least one.
        on_request: called before each request is sent.
    """
    request = user.first_request()
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": request.text}]
    for number in range(1, requests + 1):
        on_request()
        reply = await client.send_main_turn(messages, session, last=number == requests, temperature=CHAT_TEMPERATURE)
        if number < requests:
            follow_up = user.follow_up(request, reply.text)
            messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": follow_up.text}]
            request = follow_up.request


@dataclass(frozen=True, slots=True)
class Scores:
    """Shares of the evaluation requests, as in `Grade`."""

    match: float
    exact: float


async def measure(client: ChatClient, preference: Preference, model: str) -> Scores:
    """Send all evaluation requests to one version, each as a side turn in its own session, and grade the answers.

    Args:
        model: the version's served name.

    Raises:
        ModelGone, SetupError: as `ChatClient.send_side_turn`.
    """
    semaphore = asyncio.Semaphore(_CONCURRENT_REQUESTS)

    async def ask(number: int) -> Grade:
        request = EVALUATION[number]
        async with semaphore:
            text = await client.send_side_turn(request.text, model, f"evaluation-{model}-{number}")
        return grade(request, text, preference)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(number)) for number in range(len(EVALUATION))]
    except* SetupError as error:
        raise error.exceptions[0] from None
    grades = [task.result() for task in tasks]
    return Scores(
        match=sum(grade.match for grade in grades) / len(grades),
        exact=sum(grade.exact for grade in grades) / len(grades),
    )
