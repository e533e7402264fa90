"""What a gateway recorded of OpenClaw's requests, read through its admin API."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.openclaw.script import MARK, About, about, text_of
from tests.e2e.openclaw.stack import Stack

# The inserts of a busy machine go by the spool.
RECORD_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Turn:
    """
    Args:
        view: as the API shows it.
        about: what its request was for, by the request's own messages.
        followed_by: the next state.
    """

    view: dict[str, Any]
    messages: Sequence[dict[str, Any]]
    about: About
    reply: dict[str, Any] | None
    followed_by: Sequence[dict[str, Any]]

    @property
    def main(self) -> bool:
        return bool(self.view["kind"] == "main")

    @property
    def calls(self) -> bool:
        return bool((self.reply or {}).get("tool_calls"))


@dataclass
class Session:
    view: dict[str, Any]
    turns: list[Turn] = field(default_factory=list)

    @property
    def main(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.main]

    @property
    def conversations(self) -> set[str]:
        return {turn.about.conversation for turn in self.turns if turn.about.conversation is not None}


async def read_back(stack: Stack, whole: Callable[[Sequence[Session]], bool] | None = None) -> list[Session]:
    """The sessions that began in this test, once they are whole.

    Args:
        whole: None: once every request that reached the engine is recorded.
    """
    async with stack.admin() as client, asyncio.timeout(RECORD_SECONDS):
        while True:
            read = await _read(client, [view for view in await stack.all_sessions() if view["id"] not in stack.earlier])
            count = sum(len(session.turns) for session in read)
            if count >= stack.requests() if whole is None else whole(read):
                return read
            await asyncio.sleep(0.5)


async def _read(client: httpx.AsyncClient, views: Sequence[dict[str, Any]]) -> list[Session]:
    following = await _next_states(client)
    read = []
    for view in views:
        session = Session(view)
        for turn in (await _get(client, f"/admin/v1/sessions/{view['id']}"))["turns"]:
            detail = await _get(client, f"/admin/v1/turns/{turn['id']}")
            messages, reply = detail["messages"], detail["response"]
            after = following.get(turn["id"], [])
            session.turns.append(Turn(detail["turn"], messages, about(messages), reply, after))
        read.append(session)
    return read


async def _get(client: httpx.AsyncClient, path: str) -> Any:
    answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def _next_states(client: httpx.AsyncClient) -> dict[str, list[dict[str, Any]]]:
    exported = await client.get("/admin/v1/export", params={"records": "turns"})
    assert exported.status_code == 200, exported.text
    lines = [json.loads(line) for line in exported.text.splitlines()]
    return {line["id"]: line["followed_by"] for line in lines}


def by_conversation(sessions: Sequence[Session]) -> dict[str, Session]:
    """The one session of each conversation's main turns."""
    found: dict[str, list[Session]] = defaultdict(list)
    for session in sessions:
        for conversation in {turn.about.conversation for turn in session.main}:
            assert conversation is not None, f"a main turn without a message of ours: {session.main[0].messages[-2:]}"
            found[conversation].append(session)
    assert all(len(several) == 1 for several in found.values()), {name: len(split) for name, split in found.items()}
    return {name: session for name, [session] in found.items()}


def check_kinds(sessions: Sequence[Session]) -> None:
    """Every answer to a person is a main turn and every chore a side turn; no session mixes conversations."""
    for session in sessions:
        assert len(session.conversations) <= 1, session.conversations
        for turn in session.turns:
            assert turn.main == (turn.about.what == "turn"), (turn.about, turn.view["kind_reason"])
            assert turn.view["status"] == "complete", turn.view


def check_chain(session: Session, last: int) -> None:
    """Messages 1 to `last` were answered in order, and each answer is followed by what came next."""
    turns = session.main
    assert [turn.about.number for turn in turns if not turn.calls] == list(range(1, last + 1))
    for turn, after in zip(turns, [*turns[1:], None], strict=True):
        said = "".join(text_of(message) for message in turn.followed_by)
        if after is None:
            assert turn.followed_by == [], said
            continue
        assert after.view["parent_turn_id"] == turn.view["id"], after.about
        if turn.calls:
            assert [message["role"] for message in turn.followed_by] == ["tool"]
            assert f"ask-{turn.about.conversation}-{turn.about.number}" in said
        else:
            assert {int(n) for _, n in MARK.findall(said)} == {(turn.about.number or 0) + 1}
            assert {message["role"] for message in turn.followed_by} == {"user"}
