"""One run: chatting sessions that stay up, fault after fault, and after each the recovery and the checks."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from tests.chaos.chatters import Chatters, inexcusable
from tests.chaos.faults import RECOVERY_SECONDS, Fault, NotReached, all_faults, choose, run_command
from tests.chaos.fuzzer import Fuzzer
from tests.chaos.judged import lost_judgements, sessions_left_open
from tests.chaos.practised import left_of_erased, most_practised_session, oldest_lesson, seen_practice
from tests.chaos.stack import Stack
from tests.chaos.verify import Verifier

BASELINE = 5


class NoStep(Exception):
    """Training did not go on; says after which fault, and what it waits for."""


@dataclass(frozen=True)
class Outcome:
    """
    Args:
        lasted_seconds: how long the fault was on.
        chat_seconds: from its end until a new client had a whole answer; None: not reached.
        training_seconds: from its end until the next step was committed; None if that was not waited for.
        failures: requests of the chatting sessions that failed, by reason.
        problems: what the checks and the fuzzer found, and failures that no fault excuses.
        compared: versions in the engine whose files were compared with those of their rows.
    """

    number: int
    kind: str
    reached: bool
    lasted_seconds: float
    chat_seconds: float
    training_seconds: float | None
    failures: Counter[str]
    problems: list[str] = field(default_factory=list)
    compared: int = 0


async def run_faults(
    stack: Stack, chatters: Chatters, fuzzer: Fuzzer, runs: int, seed: int, wanted: Callable[[Fault], bool]
) -> AsyncIterator[Outcome]:
    """Faults chosen by seed; after each the next step is waited for. Some outcomes without a fault come first, and at
    the end a lesson is forgotten, where some are practised.

    Args:
        wanted: which faults are chosen from.
    """
    chance = random.Random(seed)
    verifier = Verifier(stack)
    faults = [fault for fault in all_faults(stack) if wanted(fault)]
    try:
        await _next_step(verifier, await verifier.committed_steps())
        for _ in range(BASELINE):
            # What recovery is compared with.
            yield await _inject(stack, chatters, fuzzer, verifier, Fault("no fault", _nothing), chance, 0)
        for number, fault in enumerate(choose(faults, runs, chance), 1):
            yield await _inject(stack, chatters, fuzzer, verifier, fault, chance, number)
        if stack.practises:
            fault = Fault("forget a lesson", _forget)
            yield await _inject(stack, chatters, fuzzer, verifier, fault, chance, runs + 1, trains=False)
    finally:
        await verifier.close()


async def run_these(
    stack: Stack, chatters: Chatters, fuzzer: Fuzzer, kinds: Sequence[str], seed: int, longest_seconds: float
) -> AsyncIterator[Outcome]:
    """These kinds of faults in this order; the next step is waited for after the last."""
    chance = random.Random(seed)
    verifier = Verifier(stack)
    faults = {fault.kind: fault for fault in all_faults(stack, longest_seconds)}
    try:
        for number, kind in enumerate(kinds, 1):
            is_last = number == len(kinds)
            yield await _inject(stack, chatters, fuzzer, verifier, faults[kind], chance, number, trains=is_last)
    finally:
        await verifier.close()


async def problems_at_the_end(stack: Stack, chatters: Chatters) -> list[str]:
    """What is wrong after a run, once nobody chats any more.

    All checks again, judgements that never came, ended sessions that did not close, and practice that somebody saw or
    that outlives its request.
    """
    verifier = Verifier(stack)
    try:
        found = await verifier.problems(chatters.seen) + inexcusable(chatters.take_failures())
        lost, left_open = await asyncio.gather(
            lost_judgements(stack.database_url), sessions_left_open(stack.database_url, chatters.ended)
        )
        found += [*lost, *left_open, *await seen_practice(stack.database_url, chatters.seen)]
        if (session := await most_practised_session(stack.database_url)) is not None:
            await run_command(stack, "erase", "--session", session, "--yes")
            found += await left_of_erased(stack.database_url, session) + await verifier.problems(chatters.seen)
        return found
    finally:
        await verifier.close()


async def _inject(
    stack: Stack,
    chatters: Chatters,
    fuzzer: Fuzzer,
    verifier: Verifier,
    fault: Fault,
    chance: random.Random,
    number: int,
    *,
    trains: bool = True,
) -> Outcome:
    before = inexcusable(chatters.take_failures())
    began = time.monotonic()
    reached = True
    try:
        await fault.inject(stack, chance)
    except NotReached:
        reached = False
    lasted = time.monotonic() - began
    ended = time.monotonic()
    chat_seconds = await chatters.first_answer(RECOVERY_SECONDS)
    training_seconds = None
    if trains:
        await _next_step(verifier, await verifier.committed_steps(), f"fault {number}, {fault.kind}")
        training_seconds = time.monotonic() - ended
    compared = verifier.compared
    problems = await verifier.problems(chatters.seen) + fuzzer.take_problems()
    chatters.raise_if_ended()
    failures = chatters.take_failures()
    return Outcome(
        number,
        fault.kind,
        reached,
        lasted,
        chat_seconds,
        training_seconds,
        failures,
        before + problems + inexcusable(failures),
        verifier.compared - compared,
    )


async def _nothing(stack: Stack, chance: random.Random) -> None: ...


async def _forget(stack: Stack, chance: random.Random) -> None:
    if (lesson := await oldest_lesson(stack.database_url)) is None:
        raise NotReached
    await run_command(stack, "lesson", "forget", lesson)


async def _next_step(verifier: Verifier, before: int, after: str = "the start") -> None:
    deadline = time.monotonic() + RECOVERY_SECONDS
    while await verifier.committed_steps() <= before:
        if time.monotonic() > deadline:
            waiting = await verifier.what_training_waits_for()
            raise NoStep(f"no step within {RECOVERY_SECONDS:g} s after {after}: {waiting}")
        await asyncio.sleep(0.2)
