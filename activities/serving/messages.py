"""Messages between workflows and the activities that serve versions: ids, names of versions and reasons.

Durable: open workflows and saved histories hold these; later fields are optional.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

PROBLEM_LIMIT = 200  # characters of a reason that cross Temporal; PostgreSQL holds all of it


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True)


class EngineReport(_Message):
    """An engine's state when its agent last checked. Versions are named as the engine serves them.

    Args:
        healthy: it answers.
        problem: why it does not answer, or lacks a version; empty if neither.
        versions: loaded, and requests are routed to them.
        missing: wanted and not loaded.
        leaving: loaded and no longer needed.
    """

    engine_id: str
    healthy: bool
    problem: str = ""
    versions: list[str] = []
    missing: list[str] = []
    leaving: list[str] = []


class EngineLoad(_Message):
    """Load the versions that are wanted and missing."""

    engine_id: str


class EngineUnload(_Message):
    """Unload the versions that are no longer needed."""

    engine_id: str


class EngineWatch(_Message):
    """Watch the engine until its state differs from `seen`, or versions have to be loaded or unloaded.

    Args:
        seen: None: return at once.
    """

    engine_id: str
    seen: EngineReport | None = None


class PublishVersion(_Message):
    """Publish the policy's newest version, whichever that is when the activity ends.

    While no engine has it, the activity raises EngineUnavailable and Temporal retries, so that waiting for an engine
    adds no events to the workflow's history.
    """

    policy: str


class Published(_Message):
    """
    Args:
        head: the newest committed version on the current path.
        version: the version that answers now.
        engines: how many engines have it.
        missing: how many engines left rotation until they have it.
        reason: why the head does not answer, e.g. another version is pinned; empty if it does.
        waited_seconds: how long publishing took.
    """

    policy: str
    head: int
    version: int
    engines: int
    missing: int
    reason: str
    waited_seconds: float
