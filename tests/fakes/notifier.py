"""A notifier that records its notices, and can fail or hang."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from clawloop.core.contracts.notices import (
    BatchWaits,
    Notice,
    OperatorChanged,
    RolloutsChanged,
    SessionErased,
    SessionNotice,
)
from clawloop.core.contracts.sessions import ContentErased, FeedbackGiven, RejudgeRequested, SessionFacts, TurnRecorded
from clawloop.core.contracts.training import OperatorChange
from clawloop.core.errors import SignalFailed
from clawloop.core.ids import SessionId


class FakeNotifier:
    """Satisfies `clawloop.core.contracts.notices.Notifier`.

    Attributes:
        notices: those that were sent, in order.
        calls: how many were tried.
        available: False makes every call raise SignalFailed.
        hangs: True makes every call wait for ever.
    """

    def __init__(self) -> None:
        self.notices: list[Notice] = []
        self.calls = 0
        self.available = True
        self.hangs = False

    async def notify(self, notice: Notice) -> None:
        self.calls += 1
        if self.hangs:
            await asyncio.Event().wait()
        if not self.available:
            raise SignalFailed("Temporal: away")
        self.notices.append(notice)

    @property
    def sent(self) -> list[tuple[SessionFacts, TurnRecorded | FeedbackGiven | RejudgeRequested | None]]:
        """Sessions and their messages."""
        return [(sent.session, sent.message) for sent in self.notices if isinstance(sent, SessionNotice)]

    @property
    def erased(self) -> list[tuple[SessionId, ContentErased]]:
        return [(sent.session, sent.erased) for sent in self.notices if isinstance(sent, SessionErased)]

    @property
    def changes(self) -> list[tuple[str, OperatorChange]]:
        """Operators' changes with their policies."""
        return [(sent.policy, sent.change) for sent in self.notices if isinstance(sent, OperatorChanged)]

    @property
    def waiting(self) -> list[str]:
        """Policies that have a batch."""
        return [sent.policy for sent in self.notices if isinstance(sent, BatchWaits)]

    @property
    def rollouts(self) -> list[str]:
        """Policies whose rollouts changed."""
        return [sent.policy for sent in self.notices if isinstance(sent, RolloutsChanged)]


class NoWork:
    """Satisfies `activities.notify.WorkStore`: no batch ever waits."""

    async def pending_work(self, age: timedelta) -> list[str]:
        return []

    async def mark_work_notified(self, policies: Sequence[str]) -> None: ...
