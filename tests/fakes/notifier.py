"""An announcer that remembers what it was told, and can fail or never answer."""

from __future__ import annotations

import asyncio

from clawloop.contracts.sessions import ContentErased, FeedbackGiven, RejudgeRequested, SessionFacts, TurnRecorded
from clawloop.errors import SignalFailed
from clawloop.ids import SessionId
from clawloop.recipes.recipe import Recipe

Told = TurnRecorded | FeedbackGiven | RejudgeRequested


class FakeNotifier:
    """Satisfies `api.ports.Announcer`, `api.ports.SessionOperations` and `activities.judging.ports.Announcer`.

    Attributes:
        sent: in order.
        erased: what sessions' workflows were told of erasures.
        available: False makes every call raise SignalFailed.
        hangs: True makes every call wait for ever.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[SessionFacts, Told | None]] = []
        self.erased: list[tuple[SessionId, ContentErased]] = []
        self.calls = 0
        self.available = True
        self.hangs = False

    async def notify_turn(self, session: SessionFacts, turn: TurnRecorded) -> None:
        await self._tell(session, turn)

    async def notify_feedback(self, session: SessionFacts, feedback: FeedbackGiven) -> None:
        await self._tell(session, feedback)

    async def rejudge(self, session: SessionFacts, wanted: RejudgeRequested) -> None:
        await self._tell(session, wanted)

    async def content_erased(self, session: SessionId, erased: ContentErased) -> None:
        if not self.available:
            raise SignalFailed("the fake was told to be away")
        self.erased.append((session, erased))

    async def wake(self, session: SessionFacts) -> None:
        await self._tell(session, None)

    async def _tell(self, session: SessionFacts, message: Told | None) -> None:
        self.calls += 1
        if self.hangs:
            await asyncio.Event().wait()
        if not self.available:
            raise SignalFailed("the fake was told to be away")
        self.sent.append((session, message))


class FakeWorkNotifier:
    """Satisfies `activities.training.ports.WorkNotifier`.

    Attributes:
        policies: notified, in order.
        available: False makes every call raise SignalFailed.
    """

    def __init__(self) -> None:
        self.policies: list[str] = []
        self.available = True

    async def notify_work(self, policy: str) -> None:
        if not self.available:
            raise SignalFailed("Temporal: away")
        self.policies.append(policy)


class FakeOperations:
    """Satisfies `api.ports.Operations`.

    Attributes:
        calls: what operators said, in order.
        available: False makes every call raise SignalFailed.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, object]] = []
        self.available = True

    async def pause(self, policy: str, reason: str) -> None:
        self._say("pause", policy, reason)

    async def resume(self, policy: str, retry: bool) -> None:
        self._say("resume", policy, retry)

    async def roll_back(self, policy: str, version: int) -> None:
        self._say("roll back", policy, version)

    async def pin(self, policy: str, version: int | None) -> None:
        self._say("pin", policy, version)

    async def set_recipe(self, policy: str, recipe: Recipe) -> None:
        self._say("set recipe", policy, recipe.name)

    def _say(self, what: str, policy: str, value: object) -> None:
        if not self.available:
            raise SignalFailed("Temporal: away")
        self.calls.append((what, policy, value))
