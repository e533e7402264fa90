"""With a session go the copies of its text in side sessions, as OpenClaw without its headers makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clawloop.core.contracts.turns import Message, TurnKind, TurnOutcome, TurnRecord
from clawloop.core.ids import ApiKeyId, SessionId
from clawloop.core.turns.classify import classify
from clawloop.core.turns.identify import identify
from clawloop.environments.artifacts import ArtifactFolder
from clawloop.operations.sessions import SessionOperations
from tests.chats import assistant, system, user
from tests.contract.conftest import Stores
from tests.fakes.notifier import FakeNotifier
from tests.openclaw_chats import AGENT_PROMPT, COMPACTION, DEMO_LINE, MEMORY_FLUSH, TOOLS
from tests.records import turn_record

STAMP = "[Mon 2026-11-23 12:55 UTC]"
KEYS = "Where did I leave the keys of the summer house?"
RIVERS = "Which is longer, the Rhine or the Elbe at low water?"


def agent_turn(said: str, session: str, *more: Message) -> list[Message]:
    line = DEMO_LINE.replace("sessionId=side-demo", f"sessionId={session}")
    return [AGENT_PROMPT, user(f"{STAMP} {said}\n\n{line}"), *more]


def flush(said: str, reply: str) -> list[Message]:
    """OpenClaw runs it under a name of its own."""
    return agent_turn(said, f"internal-session-effects-{len(said)}", assistant(reply), user(MEMORY_FLUSH))


def summary(of: str) -> list[Message]:
    return [system(COMPACTION), user(f"<conversation>\n[User]: {of}\n</conversation>\n\nSummarize.")]


def record(key: ApiKeyId, messages: list[Message], reply: str) -> TurnRecord:
    body: dict[str, Any] = {"messages": messages, "tools": None if messages[0]["content"] == COMPACTION else TOOLS}
    return turn_record(
        api_key_id=key,
        messages=messages,
        response=assistant(reply),
        evidence=identify({}, body),
        kind=classify({}, body, side_alias=False).kind,
    )


async def insert(stores: Stores, *turns: TurnRecord) -> list[SessionId]:
    return [(await stores.turns.insert(turn)).session_id for turn in turns]


async def erased(stores: Stores, *turns: TurnRecord) -> list[bool]:
    stored = [await stores.turns.load(turn.turn_id) for turn in turns]
    return [turn is not None and turn.outcome is TurnOutcome.ERASED for turn in stored]


async def test_summaries_and_flushes_of_a_session_are_erased_with_it(stores: Stores, tmp_path: Path) -> None:
    own = record(stores.key, agent_turn(KEYS, "side-demo"), "In the blue bowl beside the door.")
    copies = [
        record(stores.key, flush(KEYS, "In the blue bowl beside the door."), "NO_REPLY"),
        record(stores.key, summary(KEYS), "## Goal\nThe user looks for the keys of a house."),
        record(stores.key, summary("<previous>\nThe user looks for the keys of a house.\n</previous>"), "## Goal"),
    ]
    others = [
        record(stores.key, agent_turn(RIVERS, "other-demo"), "The Rhine."),
        record(stores.key, flush(RIVERS, "The Rhine."), "NO_REPLY"),
        record(stores.key, summary(RIVERS), "## Goal\nRivers"),
        record(stores.other_key, summary(KEYS), "## Goal\nOf another key."),
    ]
    assert [turn.kind for turn in copies] == [TurnKind.SIDE] * 3
    sessions = await insert(stores, own, *copies, *others)
    assert len(set(sessions)) == len(sessions)
    artifacts = ArtifactFolder(tmp_path)
    operations = SessionOperations(None, stores.erasures, artifacts.delete, FakeNotifier())  # type: ignore[arg-type]  # nothing is judged
    applied = await operations.erase_session(sessions[0])
    assert applied is not None
    assert applied.result.turns == 1 + len(copies)
    assert applied.result.session.session_id == sessions[0]
    assert await erased(stores, own, *copies) == [True] * 4
    assert await erased(stores, *others) == [False] * 4
    again = await operations.erase_session(sessions[0])
    assert again is not None
    assert again.result.turns == 0
