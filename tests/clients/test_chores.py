"""What real clients sent, sent again: which of it are chores, of which session it is, and what follows each reply.

The captures are requests of Codex 0.169, Claude Code 2.1.328, OpenCode 1.18.33, Qwen Code 0.24.4 and Hermes 0.19, with
long texts and lists of tools shortened. docs/clients.md has what was recorded of them.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from clawloop.core.contracts.turns import MatchedBy, SessionSource, StoredTurn, TurnKind
from clawloop.core.ids import SessionId, TurnId
from clawloop.core.turns.canonical import text_parts, without_asides
from clawloop.core.turns.next_state import next_states
from clawloop.core.turns.parents import Candidate
from db.turns.prepared_turn import PreparedTurn
from tests.api.conftest import Gateway, gateway, shared_gateway
from tests.fakes.replies import Reply

__all__ = ["gateway", "shared_gateway"]

_IDS = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|ses_[0-9A-Za-z]{26}")
CAPTURES = Path(__file__).parent / "captures"
CHORES = {
    "codex_compaction": "mmsmm",
    "codex_review": "s",
    "claude_code_compact": "mssmm",
    "claude_code_agent": "mmsmmm",
}
# Of each request: main or side, its session, and what followed its reply.
RECORDED: dict[str, tuple[str, str, dict[int, str]]] = {
    "opencode": (
        "smmmmmsmmsmmm",
        "aaaaaabaaaaaa",
        {
            **{1: "result", 2: "No, that was wrong.", 3: "result", 4: "Delegate.", 5: "result", 7: "Big one."},
            **{10: "Thank you.", 11: "Bye."},
        },
    ),
    "qwen_code": (
        "mmmmmmsmmsmsssms",
        "aaaaaabaacadaefg",
        {
            **{0: "result", 1: "No, that was wrong.", 2: "result", 3: "Delegate.", 4: "result", 7: "Big one."},
            **{8: "Thank you."},
        },
    ),
    "hermes": (
        "mmsmmsmmsmsmsmsmsm",
        "aabaaaaacaaaaaaada",
        {
            **{0: "result", 1: "No, that was wrong.", 3: "result", 4: "Delegate.", 6: "result", 9: "More."},
            **{11: "Big one.", 13: "Thank you.", 15: "Bye."},
        },
    ),
}


def captured(name: str) -> list[dict[str, Any]]:
    """Requests of a session that no other test has."""
    text = (CAPTURES / f"{name}.json").read_text()
    for known in sorted(set(_IDS.findall(text))):
        text = text.replace(known, str(uuid4()))
    requests: list[dict[str, Any]] = json.loads(text)
    return requests


async def send_again(gateway: Gateway, requests: list[dict[str, Any]]) -> list[StoredTurn]:
    """The turns of all requests, each answered as the client was answered then."""
    said: list[Reply] = []
    for request in requests:
        said.append(Reply(*request["reply"]) if "reply" in request else reply_to(request, requests))
    gateway.engine.script = lambda body: said[len(gateway.engine.requests) - 1]
    gateway.engine.requests.clear()
    async with gateway.client() as client:
        for number, request in enumerate(requests):
            answer = await client.post(request["path"], json=request["body"], headers=request["headers"])
            assert answer.status_code == 200, answer.text
            await gateway.recorded(number + 1)
    turns = [await gateway.turns.load(record.turn_id) for record in await gateway.recorded(len(requests))]
    return [turn for turn in turns if turn is not None]


def reply_to(request: dict[str, Any], requests: list[dict[str, Any]]) -> Reply:
    """What a later request of the same client shows as the reply."""
    history = request["body"].get("messages") or request["body"]["input"]
    for later in requests[requests.index(request) + 1 :]:
        items = later["body"].get("messages") or later["body"]["input"]
        if len(items) > len(history) and plain(items[: len(history)]) == plain(history):
            text, calls = "", []
            for item in items[len(history) :]:
                if item.get("type") == "function_call":
                    calls.append((item["name"], json.loads(item["arguments"])))
                elif item.get("role") == "assistant":
                    parts = item["content"] if isinstance(item["content"], list) else [{"text": item["content"]}]
                    text += "".join(part.get("text", "") for part in parts)
                    calls += [(part["name"], part["input"]) for part in parts if part.get("type") == "tool_use"]
                else:
                    break
            return Reply(text, calls)
    return Reply("Nothing follows.")


def plain(items: list[dict[str, Any]]) -> Any:
    """Without what a client changes in what it sent before."""
    copied = copy.deepcopy(items)
    for item in copied:
        for part in item["content"] if isinstance(item.get("content"), list) else ():
            part.pop("cache_control", None)
        if isinstance(item.get("content"), str):
            item["content"] = [{"type": "text", "text": item["content"]}]
    return copied


async def reactions(gateway: Gateway, turns: list[StoredTurn]) -> dict[int, str]:
    """What people said after each reply, by the reply's place; and `result` for what tools did."""
    candidates: list[tuple[Candidate, SessionId]] = []
    found: dict[TurnId, str] = {}
    for turn in turns:
        prepared = PreparedTurn(turn.record)
        request = prepared.request
        if turn.record.kind is TurnKind.MAIN:
            placed = gateway.turns.placed(turn.session_id, request).replies
            known = [candidate for candidate, session in candidates if session == turn.session_id]
            for answered, state in next_states(request.seed, turn.record.messages, known, placed).items():
                people = ["".join(text_parts(without_asides(each))) for each in state if each["role"] == "user"]
                found.setdefault(answered, people[-1] if people else "result")
        assert prepared.response_digest is not None
        assert prepared.reply_digest is not None
        kind = turn.record.kind
        candidate = Candidate(turn.record.turn_id, kind, prepared.response_digest, prepared.reply_digest)
        candidates.append((candidate, turn.session_id))
    return {place: found[turn.record.turn_id] for place, turn in enumerate(turns) if turn.record.turn_id in found}


@pytest.mark.parametrize("name", RECORDED)
async def test_what_a_client_does_on_its_own_is_no_reaction(gateway: Gateway, name: str) -> None:
    kinds, sessions, followed = RECORDED[name]
    turns = await send_again(gateway, captured(name))
    assert "".join(turn.record.kind.value[0] for turn in turns) == kinds
    order = list(dict.fromkeys(turn.session_id for turn in turns))
    assert "".join("abcdefgh"[order.index(turn.session_id)] for turn in turns) == sessions
    said = {place: text.strip('" \n').partition(" {{")[0] for place, text in (await reactions(gateway, turns)).items()}
    assert said == followed


@pytest.mark.parametrize("name", CHORES)
async def test_chores_are_side_turns_of_the_clients_session(gateway: Gateway, name: str) -> None:
    turns = await send_again(gateway, captured(name))
    assert "".join(turn.record.kind.value[0] for turn in turns) == CHORES[name]
    assert len({turn.session_id for turn in turns}) == 1
    assert all(turn.record.kind_reason for turn in turns)
    codex = name.startswith("codex")
    assert {turn.record.evidence.source for turn in turns} == {
        SessionSource.THREAD if codex else SessionSource.CLAUDE_CODE
    }


@pytest.mark.parametrize("name", ["codex_compaction", "claude_code_compact"])
async def test_no_chore_is_a_next_state(gateway: Gateway, name: str) -> None:
    turns = await send_again(gateway, captured(name))
    candidates: list[Candidate] = []
    shown: list[str] = []
    for turn in turns:
        prepared = PreparedTurn(turn.record)
        request = prepared.request
        if turn.record.kind is TurnKind.MAIN:
            placed = gateway.turns.placed(turn.session_id, request).replies
            states = next_states(request.seed, turn.record.messages, candidates, placed)
            shown += [str(message) for state in states.values() for message in state]
        assert prepared.response_digest is not None
        assert prepared.reply_digest is not None
        kind = turn.record.kind
        candidates.append(Candidate(turn.record.turn_id, kind, prepared.response_digest, prepared.reply_digest))
    assert any("Thank you." in message for message in shown)
    assert not any("CRITICAL: Respond" in message or "CHECKPOINT COMPACTION" in message for message in shown)


async def test_the_agents_of_codex_have_conversations_of_their_own(gateway: Gateway) -> None:
    requests = captured("codex_review")
    [review] = await send_again(gateway, requests)
    headers = requests[0]["headers"]
    assert headers["thread-id"] != headers["session-id"]
    assert review.record.evidence.value == headers["thread-id"]
    assert review.record.kind_reason == "sub-agent of Codex: review"


async def test_the_two_turns_before_a_compaction_and_those_after_it_are_found(gateway: Gateway) -> None:
    turns = await send_again(gateway, captured("codex_compaction"))
    ids = [turn.record.turn_id for turn in turns]
    assert [turn.parent_turn_id for turn in turns] == [None, ids[0], ids[1], None, ids[3]]
    assert {turn.matched_by for turn in turns} <= {None, MatchedBy.CONTEXT, MatchedBy.PLACE}
