"""What an engine's workflow and its agent say to each other: ids, names of versions and reasons.

Knows nothing about who does the work. Durable: open workflows and saved histories hold these; later fields are
optional.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

PROBLEM_LIMIT = 200  # characters of a reason that cross Temporal; Postgres holds the whole


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True)


class EngineHas(_Message):
    """How an engine stood when it was last looked at. Versions by the names under which it serves them.

    Args:
        healthy: it answers.
        problem: why it lacks something, or does not answer; empty if all is well.
        versions: what it has loaded and requests are routed to.
        missing: what it should have and has not.
        leaving: what it has and nobody needs any more.
    """

    engine_id: str
    healthy: bool
    problem: str = ""
    versions: list[str] = []
    missing: list[str] = []
    leaving: list[str] = []


class EngineLoad(_Message):
    """Load what the engine should have and has not."""

    engine_id: str


class EngineUnload(_Message):
    """Unload what nobody needs any more."""

    engine_id: str


class EngineWatch(_Message):
    """Look at the engine again and again; answered when it is not as `seen` any more, or something is to be done.

    Args:
        seen: None: answer at once.
    """

    engine_id: str
    seen: EngineHas | None = None
