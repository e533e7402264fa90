"""Choice of the lessons for a request: a session keeps those that it began with until its client compacts it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cachetools import LRUCache
from starlette.datastructures import Headers

from api.stores import TurnStore
from clawloop.core.contracts.lessons import PolicyLessons, ShownLesson
from clawloop.core.contracts.serving import ApiKey
from clawloop.core.contracts.turns import KindDecision, Message, SessionEvidence, TurnKind
from clawloop.core.errors import RequestRejected, StoreUnavailable
from clawloop.core.ids import ApiKeyId, LessonId
from clawloop.core.turns.canonical import prefix_digests, seed_digest
from clawloop.core.turns.identify import namespace

HEADER = "x-clawloop-lessons"
"""Of a request: `off` leaves lessons out of its prompt. Of an answer: the ids of those that its prompt held."""
# Conversations whose lessons are cached; about 300 bytes each.
CACHE_SIZE = 20_000
# After a failed look-up PostgreSQL is not queried for this long.
RETRY_INTERVAL_SECONDS = 1.0
_OFF = ("off", "0", "false", "no")
_ON = ("on", "1", "true", "yes")


def wants_lessons(headers: Headers) -> bool:
    """False if a request says that its prompt is to hold no lessons.

    Raises:
        RequestRejected: its header says neither.
    """
    wanted = headers.get(HEADER, _ON[0]).strip().lower()
    if wanted not in (*_OFF, *_ON):
        raise RequestRejected("`X-Clawloop-Lessons` is `on` or `off`.", field="X-Clawloop-Lessons")
    return wanted in _ON


class LessonChooser:
    """Caches with which lessons the newest reply of a conversation was given; asks the store about older ones."""

    def __init__(self, store: TurnStore) -> None:
        self._store = store
        self._recent: LRUCache[tuple[ApiKeyId, bytes], tuple[LessonId, ...]] = LRUCache(CACHE_SIZE)
        self._retry_at = 0.0

    async def choose(
        self,
        key: ApiKey,
        lessons: PolicyLessons | None,
        evidence: SessionEvidence,
        kind: KindDecision,
        messages: Sequence[Message],
    ) -> tuple[ShownLesson, ...]:
        """The lessons for a request with these messages, in their order.

        Args:
            lessons: of the policy; None: it has lessons off.
        """
        if lessons is None or kind.kind is TurnKind.SIDE or key.episode is not None:
            return ()
        # A lesson that was erased meanwhile is left out at once; one that was turned off, with the next session.
        kept = await self._of_conversation(key.id, evidence, messages)
        chosen = lessons.active if kept is None else kept
        return tuple(ShownLesson(lesson, lessons.known[lesson]) for lesson in chosen if lesson in lessons.known)

    def remember(
        self, key: ApiKeyId, evidence: SessionEvidence, conversation: Sequence[Message], lessons: Sequence[ShownLesson]
    ) -> None:
        """Cache that a conversation's last reply was given with these lessons."""
        self._recent[key, _digest(key, evidence, conversation)] = tuple(lesson.id for lesson in lessons)

    async def _of_conversation(
        self, key: ApiKeyId, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> tuple[LessonId, ...] | None:
        """The lessons of the turn that these messages continue; None if they continue none.

        None at all if PostgreSQL does not answer: a session may have begun without any, or with others than today's.
        """
        last = max((at for at, message in enumerate(messages) if message.get("role") == "assistant"), default=None)
        if last is None:
            return None
        if (recent := self._recent.get((key, _digest(key, evidence, messages[: last + 1])))) is not None:
            return recent
        if time.monotonic() < self._retry_at:
            return ()
        try:
            return await self._store.lessons_of_parent(key, evidence, messages)
        except StoreUnavailable:
            self._retry_at = time.monotonic() + RETRY_INTERVAL_SECONDS
            return ()


def _digest(key: ApiKeyId, evidence: SessionEvidence, messages: Sequence[Message]) -> bytes:
    seed = seed_digest(namespace(key, evidence), evidence.narrowing)
    return prefix_digests(seed, messages)[-1]
