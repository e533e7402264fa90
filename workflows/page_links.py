"""Summaries of workflows for Temporal's UI: whose each is, and where the page and the commands show it.

Notifiers say it with the page's address when they start a workflow. That does not outlive continue-as-new, so workflows
say it too, with the page's path alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from clawloop.core.ids import SessionId


@dataclass(frozen=True, slots=True)
class PageLinks:
    """
    Args:
        page: where people find the page, without a slash at its end; None: not configured.
    """

    page: str | None = None

    def of_session(self, policy: str, session: SessionId) -> str:
        place = self._place(f"/sessions/{session}", "what was said, and why each reply was trained or not")
        return f"Session `{session}` of the policy `{policy}`. {place}; so does `clawloop session show {session}`."

    def of_training(self, policy: str) -> str:
        place = self._place(f"/versions?policy={policy}", "its versions, and what each was trained on")
        return f"Training of the policy `{policy}`. {place}; so does `clawloop policy versions --policy {policy}`."

    def of_engine(self, engine: str) -> str:
        place = self._place("/engines", "what is loaded where, and what is wrong")
        return f"Engine `{engine}`. {place}; so does `clawloop engine list`."

    def of_rollouts(self, policy: str) -> str:
        return f"Rollouts of the policy `{policy}`: `clawloop rollouts status --policy {policy}` shows them."

    def _place(self, path: str, what: str) -> str:
        if self.page is None:
            return f"`/ui{path}` on a gateway shows {what}"
        return f"[The page]({self.page}{path}) shows {what}"


NO_PAGE = PageLinks()
