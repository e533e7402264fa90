"""Sessions found by their messages and verdicts, as lists without the messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from clawloop.contracts.browsing import SessionFilter, SessionSummary
from clawloop.contracts.views import SessionPage
from clawloop.ids import SessionId


class SessionSearch(Protocol):
    async def search(self, wanted: SessionFilter, after: SessionId | None, limit: int) -> Sequence[SessionSummary]:
        """Sessions that fit, the one with the newest turn first; `after` is the last session of the page before.

        Raises:
            NotFound: there is no such policy.
            StoreUnavailable
        """


async def search_page(
    sessions: SessionSearch, wanted: SessionFilter, *, after: SessionId | None, limit: int
) -> SessionPage:
    """A page of the sessions that fit; their total number is not counted."""
    # One more than the page holds shows whether there is another page.
    found = await sessions.search(wanted, after, limit + 1)
    page = [summary.view for summary in found[:limit]]
    return SessionPage(sessions=page, total=None, folded=0, next=page[-1].id if len(found) > limit else None)
