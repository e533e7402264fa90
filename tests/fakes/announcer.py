"""An announcer that remembers what it was told, and can fail or never answer."""

from __future__ import annotations

import asyncio

from clawloop.contracts import FeedbackGiven, JudgeAgain, SessionFacts, TurnRecorded
from clawloop.errors import AnnouncementFailed

Told = TurnRecorded | FeedbackGiven | JudgeAgain


class FakeAnnouncer:
    """Satisfies `api.ports.Announcer`, `api.ports.Operations` and `activities.ports.Announcer`.

    Attributes:
        told: in order.
        available: False makes every call raise AnnouncementFailed.
        hangs: True makes every call wait for ever.
    """

    def __init__(self) -> None:
        self.told: list[tuple[SessionFacts, Told | None]] = []
        self.calls = 0
        self.available = True
        self.hangs = False

    async def announce_turn(self, session: SessionFacts, turn: TurnRecorded) -> None:
        await self._tell(session, turn)

    async def announce_feedback(self, session: SessionFacts, feedback: FeedbackGiven) -> None:
        await self._tell(session, feedback)

    async def judge_again(self, session: SessionFacts, wanted: JudgeAgain) -> None:
        await self._tell(session, wanted)

    async def wake(self, session: SessionFacts) -> None:
        await self._tell(session, None)

    async def _tell(self, session: SessionFacts, message: Told | None) -> None:
        self.calls += 1
        if self.hangs:
            await asyncio.Event().wait()
        if not self.available:
            raise AnnouncementFailed("the fake was told to be away")
        self.told.append((session, message))
