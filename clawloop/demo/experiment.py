"""One run of the demo: a user chats, versions come, each is measured.

Knows nothing about how anything is started. A chat never waits for learning; a *paced* user does between two
sessions, because people take longer for a session than this machine for a step.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Protocol
from uuid import UUID

from clawloop.contracts.training import TrainingState
from clawloop.demo.admin_client import AdminClient, Learning, WatchedSession
from clawloop.demo.chatting import chat_session, measure
from clawloop.demo.openai_client import ChatClient
from clawloop.demo.plan import Plan, PlannedRun
from clawloop.demo.report import Evaluated, RunTotals
from clawloop.demo.user import SyntheticUser
from clawloop.demo.world import Preference, draw_preference, flipped
from clawloop.errors import SetupError
from clawloop.ids import version_name

SESSIONS_AT_ONCE = 2
SESSION_REQUESTS = 5
# Judging, a step and publishing take seconds. What takes longer is stuck, and the figures then say so.
PATIENCE_SECONDS = 120.0
_LOOK_SECONDS = 0.3
# So long each version is measured, whatever `Plan.measure_every` says: this is where the curve bends.
MEASURED_CLOSELY = 128
_OPEN_OUTCOMES = ("waiting", "sampled")


class TrainingPaused(SetupError):
    """Training has paused itself; no more versions come."""


class Scoreboard(Protocol):
    """Where a run shows how it goes."""

    def evaluated(self, run: PlannedRun, row: Evaluated) -> None: ...

    def doing(self, run: PlannedRun, words: str) -> None: ...

    def say(self, line: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run finds its policy.

    Args:
        url: the gateway's, without `/v1`.
        key: of the run's policy; admin_key: of any.
        base_model: the name under which version 0 is served.
    """

    url: str
    key: str
    admin_key: str
    base_model: str


def rounds(interactions: int) -> list[list[int]]:
    """How many requests each session has, the sessions of a round side by side; together `interactions`."""
    left, planned = interactions, []
    while left:
        sizes: list[int] = []
        while left and len(sizes) < SESSIONS_AT_ONCE:
            sizes.append(min(left, SESSION_REQUESTS))
            left -= sizes[-1]
        planned.append(sizes)
    return planned


@dataclass
class Experiment:
    """
    Args:
        plan: paced, the user waits between two rounds of sessions until what was said is learned.

    Attributes:
        evaluated: so far, in order.
    """

    run: PlannedRun
    place: Place
    talker: ChatClient
    watcher: AdminClient
    board: Scoreboard
    plan: Plan
    patience_seconds: float = PATIENCE_SECONDS
    evaluated: list[Evaluated] = field(default_factory=list)
    _steps: set[int] = field(default_factory=set)
    _begun: float = 0.0
    _interactions: int = 0
    _waiting: bool = False  # the user says nothing until what was said is learned
    _asked: dict[str, int] = field(default_factory=dict)  # requests by session
    _sessions: dict[str, WatchedSession] = field(default_factory=dict)  # as last seen
    _finalized: set[str] = field(default_factory=set)  # sessions of which no turn changes any more
    _judged: set[UUID] = field(default_factory=set)
    _newest: int = 0  # version that answers
    _flipped_at: int | None = None
    _preference: Preference = field(init=False)

    def __post_init__(self) -> None:
        self._preference = draw_preference(self.run.seed)

    async def hold(self) -> None:
        """Chat, and measure the versions that come.

        Raises:
            TrainingPaused
            SetupError: the gateway gives no answer.
        """
        self._begun = time.monotonic()
        await self._evaluate(0)
        following = None if self.plan.paced else asyncio.create_task(self._follow())
        before = self.plan.interactions // 2 if self.plan.flip else self.plan.interactions
        try:
            await self._chat_for(before, following)
            if self.plan.flip:
                await self._flip()
                await self._chat_for(self.plan.interactions - before, following)
            self._waiting = True
            if following is not None:
                await following
        finally:
            if following is not None:
                following.cancel()
        await self._catch_up()

    async def totals(self, stopped: str | None = None) -> RunTotals:
        """
        Args:
            stopped: why the run ended early.
        """
        await self._reward()  # for the steps of the last turns
        return RunTotals(
            interactions=self._interactions,
            failed=self.talker.failed,
            versions=await self.watcher.versions_made(self.run.policy),
            steps=len(self._steps),
            seconds=time.monotonic() - self._begun,
            flipped_at=self._flipped_at,
            stopped=stopped,
        )

    async def _chat_for(self, interactions: int, following: asyncio.Task[None] | None) -> None:
        for sizes in rounds(interactions):
            said = f"{self._interactions} of {self.plan.interactions} interactions"
            self.board.doing(self.run, f"{said}, chatting")
            if following is not None and following.done():
                await following  # it ended too soon, and says why
            await self._chat(sizes)
            if following is None:
                self._waiting = True
                await self._follow()
                self._waiting = False

    async def _flip(self) -> None:
        """From now on the user likes something else; whoever measures goes by it."""
        if self.plan.paced:
            await self._catch_up()
        self._preference = flipped(self._preference, self.plan.flip)
        self._flipped_at = self._interactions
        if self.plan.paced:
            await self._evaluate(self._newest)

    async def _catch_up(self) -> None:
        """Measure the version that answers, if it was passed over."""
        if self._newest > self.evaluated[-1].version:
            await self._evaluate(self._newest)

    async def _chat(self, sizes: list[int]) -> None:
        preference = self._preference

        async def one(number: int, size: int) -> None:
            name = f"{self.run.policy}-{number}"
            self._asked[name] = 0
            # A user of its own for each session: what they say then does not depend on whose answer comes first.
            user = SyntheticUser(self.run.seed * 10_000 + number, preference)
            await chat_session(self.talker, user, name, size, partial(self._count, name))

        first = len(self._asked) + 1
        try:
            async with asyncio.TaskGroup() as group:
                for offset, size in enumerate(sizes):
                    group.create_task(one(first + offset, size))
        except* SetupError as several:
            raise several.exceptions[0] from None

    def _count(self, session: str) -> None:
        self._interactions += 1
        self._asked[session] += 1

    async def _is_learned(self) -> bool:
        """Whether every turn has arrived (they may come late, over the spool), and nothing is left to do with them."""
        await self._look_for_sessions()
        for name, seen in self._sessions.items():
            if seen.main_turns < self._asked[name]:
                self._sessions[name] = replace(seen, main_turns=len(await self.watcher.main_turns(seen.id)))
        arrived = sum(seen.main_turns for seen in self._sessions.values())
        return arrived >= self._interactions and (await self.watcher.learning(self.run.policy)).is_done

    async def _look_for_sessions(self) -> None:
        """Take note of those among the newest; each evaluation is 60 sessions, so older chats are not among them."""
        for session in await self.watcher.sessions(self.run.policy):
            if session.name in self._asked:
                self._sessions[session.name] = session

    async def _follow(self) -> None:
        """Measure versions as they come, until the user waits and there is nothing left to wait for."""
        waited_since = time.monotonic()
        while True:
            now = await self.watcher.learning(self.run.policy)
            if now.version > self._newest or self._is_flip_unmeasured():
                self._newest = now.version
                if self._is_due():
                    await self._evaluate(now.version)
                waited_since = time.monotonic()
                continue
            if self._waiting and now.is_done and await self._is_learned():
                return
            if now.state is TrainingState.PAUSED:
                raise TrainingPaused(f"training of {self.run.policy} has paused itself: {now.reason}")
            if not self._waiting:
                waited_since = time.monotonic()
            if time.monotonic() - waited_since > self.patience_seconds:
                self.board.say(f"{self.run.policy}: no longer waiting after {self.patience_seconds:g} s: {now.reason}")
                return
            self.board.doing(self.run, f"{self._interactions} interactions; {_waited_for(now)}")
            await asyncio.sleep(_LOOK_SECONDS)

    def _is_flip_unmeasured(self) -> bool:
        return self._flipped_at is not None and not self.evaluated[-1].flipped

    def _is_due(self) -> bool:
        closely = self._interactions - (self._flipped_at or 0) <= MEASURED_CLOSELY
        passed = self._newest - self.evaluated[-1].version
        return closely or self._is_flip_unmeasured() or passed >= self.plan.measure_every

    async def _evaluate(self, version: int) -> None:
        interactions, is_flipped = self._interactions, self._flipped_at is not None
        self.board.doing(self.run, f"{interactions} interactions; asking version {version} the 60 fixed requests")
        model = version_name(self.run.policy, version, self.place.base_model)
        measured = await measure(self.talker, self._preference, model)
        row = Evaluated(
            step=version,
            version=version,
            interactions=interactions,
            reward=await self._reward(),
            match=measured.match,
            exact=measured.exact,
            failed=self.talker.failed,
            seconds=time.monotonic() - self._begun,
            flipped=is_flipped,
        )
        self.evaluated.append(row)
        self.board.evaluated(self.run, row)

    async def _reward(self) -> float | None:
        """Mean verdict of the turns that were judged since the last time."""
        if len(self._sessions) < len(self._asked):
            await self._look_for_sessions()
        unfinalized = {name: one.id for name, one in self._sessions.items() if name not in self._finalized}
        found = await asyncio.gather(*(self.watcher.main_turns(one) for one in unfinalized.values()))
        for name, its in zip(unfinalized, found, strict=True):
            if its and all(turn.outcome not in _OPEN_OUTCOMES for turn in its):
                self._finalized.add(name)
        turns = [turn for its in found for turn in its]
        self._steps |= {turn.step for turn in turns if turn.step is not None and turn.outcome == "trained"}
        fresh = [turn for turn in turns if turn.verdict is not None and turn.id not in self._judged]
        self._judged |= {turn.id for turn in fresh}
        return fmean(float(turn.verdict or 0) for turn in fresh) if fresh else None


def _waited_for(now: Learning) -> str:
    if now.head != now.version:
        return f"publishing version {now.head}"
    return f"step {now.step}: {now.reason}" if now.state is TrainingState.WAITING else now.reason


async def run_experiment(
    run: PlannedRun, place: Place, board: Scoreboard, plan: Plan
) -> tuple[list[Evaluated], RunTotals]:
    """A whole run; returns what it found, until training paused itself if it did.

    Raises:
        SetupError: the gateway gives no answer.
    """

    heard: set[str] = set()

    def failed(words: str) -> None:
        if words not in heard:
            heard.add(words)
            board.say(f"{run.policy}: a request failed: {words} (others that fail like it are only counted)")

    async with ChatClient(place.url, place.key, failed) as talker, AdminClient(place.url, place.admin_key) as watcher:
        course = Experiment(run, place, talker, watcher, board, plan)
        stopped = None
        try:
            await course.hold()
        except TrainingPaused as why:
            stopped = str(why)
        return course.evaluated, await course.totals(stopped)
