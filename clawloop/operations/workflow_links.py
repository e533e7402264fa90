"""Addresses of workflows in Temporal's UI."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

_NAMESPACE = "default"  # the only one that Clawloop uses


@dataclass(frozen=True, slots=True)
class WorkflowLinks:
    """
    Args:
        ui: address of Temporal's UI, without a slash at its end; None: not configured.
    """

    ui: str | None = None

    def of(self, workflow: str) -> str | None:
        """The address of a workflow's newest run, e.g. of `training/default`; None if the UI's is not known."""
        return None if self.ui is None else f"{self.ui}/namespaces/{_NAMESPACE}/workflows/{quote(workflow, safe='')}"

    def named(self, workflow: str) -> str:
        """The workflow's id, and its address if that is known."""
        link = self.of(workflow)
        return workflow if link is None else f"{workflow}  {link}"


NO_LINKS = WorkflowLinks()
