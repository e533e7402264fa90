"""What `session list`, `session show`, `why`, `key` and `engine` print, at 80 and 120 columns."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from clawloop.app.processes.bootstrap import create_default_policy
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.turns import SessionEvidence, SessionSource, TurnKind, TurnRecord, TurnStatus
from clawloop.core.ids import ApiKeyId, response_id
from db.database import BACKGROUND_LIMIT, Database
from db.judging.feedback import PostgresFeedbackStore
from db.serving.keys import PostgresKeyStore
from db.turns.insert import PostgresTurnStore
from tests.conftest import execute
from tests.records import turn_record
from tests.verbs import clawloop, clawloop_process, refusal

TITLE = "Please write me a very long poem about a fox that wanders through an endless forest, and about its friends"


def chat(key: ApiKeyId, session: str, *texts: str) -> list[TurnRecord]:
    """Turns of one session, each of which continues the one before."""
    messages: list[dict[str, Any]] = []
    turns = []
    for minute, text in enumerate(texts):
        messages.append({"role": "user", "content": text})
        reply = {"role": "assistant", "content": f"reply to {text[:20]}"}
        record = turn_record(
            api_key_id=key,
            evidence=SessionEvidence(SessionSource.HEADER, session),
            messages=list(messages),
            response=reply,
        )
        turns.append(replace(record, started_at=record.started_at - timedelta(minutes=30 - minute)))
        messages.append(reply)
    return turns


@pytest.fixture
def here(postgres_url: str, tmp_path: Path) -> dict[str, str]:
    asyncio.run(create_default_policy(postgres_url, "tiny", [], []))
    return {"DATABASE_URL": postgres_url, "CLAWLOOP_DATA": str(tmp_path), "TEMPORAL_ADDRESS": "127.0.0.1:1"}


@pytest.fixture
def turns(here: dict[str, str]) -> list[TurnRecord]:
    """Two sessions of a person, one of side turns."""

    async def insert() -> list[TurnRecord]:
        database = Database(here["DATABASE_URL"], BACKGROUND_LIMIT)
        key, _ = await PostgresKeyStore(database).create_key("default", {Scope.CHAT}, "test")
        other = chat(key.id, "other", "hello", "no")
        side = replace(chat(key.id, "side", "beat")[0], kind=TurnKind.SIDE, kind_reason="heartbeat")
        mine = chat(key.id, "mine", TITLE, "shorter", "and \x1b[31mred")
        mine[2] = replace(mine[2], status=TurnStatus.ABORTED, finish_reason=None)
        store = PostgresTurnStore(database)
        for record in (*other, side, *mine):
            await store.insert(record)
        await PostgresFeedbackStore(database).give(key.id, mine[0].turn_id, -1.0, "too long")
        await database.close()
        return mine

    return asyncio.run(insert())


@pytest.mark.parametrize("columns", [80, 120])
def test_lists_fit_the_terminal_and_their_ids_are_taken(
    columns: int, here: dict[str, str], turns: list[TurnRecord]
) -> None:
    here = here | {"COLUMNS": str(columns)}
    listed = clawloop("session", "list", **here).stdout.splitlines()
    assert max(map(len, listed)) <= columns
    assert listed[0].split() == ["id", "age", "state", "turns", "learned", "title"]
    assert listed[1].split("  ")[-1].startswith("Please write me a very long poem")
    assert listed[-1] == "1 session of a single turn or of side turns alone left out, --all"
    short = listed[1].split()[0]
    whole = json.loads(clawloop("session", "list", "--all", "--json", **here).stdout)
    assert (whole["total"], len(whole["sessions"]), whole["sessions"][0]["short_id"]) == (3, 3, short)
    assert clawloop("session", "list", "--limit", "1", **here).stdout.splitlines()[-2] == "1 of 2, --more"
    assert len(clawloop("session", "list", "--limit", "1", "--more", **here).stdout.splitlines()) == 4
    for reference in (short, "mine", "last", response_id(turns[0].turn_id)):
        shown = json.loads(clawloop("session", "show", reference, "--json", **here).stdout)
        assert shown["session"]["external_id"] == "mine"


def test_sessions_are_found_by_what_was_said_and_decided(here: dict[str, str], turns: list[TurnRecord]) -> None:
    def found(*options: str) -> list[str]:
        page = json.loads(clawloop("session", "list", "--json", *options, **here).stdout)
        assert page["total"] is None
        return [session["external_id"] for session in page["sessions"]]

    assert found("--text", "SHORTER") == ["mine"]
    assert found("--kind", "side") == ["side"]
    assert sorted(found("--version", str(turns[0].version), "--kind", "main", "--limit", "1", "--more")) == [
        "mine",
        "other",
    ]
    assert found("--verdict", "1") == []
    everything = json.loads(clawloop("session", "list", "--json", "--all", **here).stdout)
    assert found("--text", " SHORTER ", "--unjudged") == ["mine"]
    assert found("--judged") == []
    assert json.loads(clawloop("session", "list", "--json", "--all", "--text", " ", **here).stdout) == everything
    newest = clawloop("session", "list", "--kind", "main", "--limit", "1", **here).stdout.splitlines()
    assert newest[-1] == "the newest 1, --more"
    odd = clawloop_process("session", "list", "--outcome", "odd", **here)
    assert (odd.returncode, "use waiting" in odd.stderr) == (2, True)


@pytest.mark.parametrize("columns", [80, 120])
def test_a_session_reads_as_a_conversation(columns: int, here: dict[str, str], turns: list[TurnRecord]) -> None:
    here = here | {"COLUMNS": str(columns)}
    lines = clawloop("session", "show", "mine", **here).stdout.splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    first, second, third = text.split("-- turn ")[1:]
    assert "user: Please write me" in first
    assert "assistant: reply to Please" in first
    assert "rated -1 too long (amends)" in first
    assert "Please write me" not in second
    assert "user: shorter" in second
    assert "why waits for" in second
    assert "\N{REPLACEMENT CHARACTER}[31mred" in third
    assert "aborted" in third
    assert "the client went away before the reply ended; waits for" in third
    partly = clawloop("session", "show", "mine", "--limit", "1", **here).stdout
    assert partly.endswith("the newest 1 of 3 turns, --more\n")


def test_why_takes_what_session_show_prints_and_is_never_empty(here: dict[str, str], turns: list[TurnRecord]) -> None:
    short = clawloop("session", "show", "mine", **here).stdout.split("-- turn 2 · ")[1].split()[0]
    why = json.loads(clawloop("why", short, "--json", **here).stdout)
    assert (why["id"], why["number"]) == (str(turns[1].turn_id), 2)
    for reference in ("last", "mine:3", str(turns[2].turn_id), response_id(turns[2].turn_id)):
        assert "why        the client went away" in clawloop("why", reference, **here).stdout
    assert "There is no turn 'mine:4'" in refusal(clawloop("why", "mine:4", **here))
    assert "There is no session 'nobody'" in refusal(clawloop("session", "show", "nobody", **here))


def test_workflows_are_linked_where_temporals_ui_is_known(here: dict[str, str], turns: list[TurnRecord]) -> None:
    known = here | {"CLAWLOOP_TEMPORAL_UI": "http://127.0.0.1:8233"}
    shown = json.loads(clawloop("session", "show", "mine", "--json", **known).stdout)["session"]
    link = f"http://127.0.0.1:8233/namespaces/default/workflows/session%2F{shown['id']}"
    assert shown["workflow_url"] == link
    assert f"link       {link}\n" in clawloop("why", "last", **known).stdout
    assert json.loads(clawloop("why", "last", "--json", **known).stdout)["workflow_url"] == link
    training = "http://127.0.0.1:8233/namespaces/default/workflows/training%2Fdefault"
    assert f"workflow   training/default  {training}\n" in clawloop("training", "status", **known).stdout
    status = json.loads(clawloop("status", "--json", **known).stdout)
    assert (status["temporal_ui"], status["workflows"]) == ("http://127.0.0.1:8233", {"training/default": training})
    unknown = json.loads(clawloop("status", "--json", **here).stdout)
    assert (unknown["temporal_ui"], unknown["workflows"]) == (None, {})
    assert "link" not in clawloop("why", "last", **here).stdout


def test_why_shows_a_replys_tokens(here: dict[str, str], turns: list[TurnRecord]) -> None:
    lines = clawloop("why", "mine:1", "--tokens", **here, COLUMNS="80").stdout.splitlines()
    assert lines[0].split() == ["id", "log-prob", "advantage", "token"]
    assert [line.split()[0] for line in lines[1:-1]] == [str(token) for token in turns[0].response_ids or ()]
    assert lines[-1] == "no step has trained it by advantages; no engine told the texts of the tokens"
    shown = json.loads(clawloop("why", "mine:1", "--tokens", "--json", **here).stdout)
    assert shown["response_ids"] == list(turns[0].response_ids or ())
    assert (shown["advantages"], shown["step"]) == (None, None)


def test_keys_are_listed_shown_again_and_revoked_by_name(here: dict[str, str], tmp_path: Path) -> None:
    made = json.loads(clawloop("key", "create", "--name", "phone", "--json", **here).stdout)
    assert made["key"].startswith(made["prefix"])
    listed = clawloop("key", "list", **here, COLUMNS="80").stdout
    assert made["prefix"] in listed
    assert clawloop("key", "revoke", "phone", "--json", **here).stdout.strip() == f'{{"prefix":"{made["prefix"]}"}}'
    assert "There is no such key 'phone'" in refusal(clawloop("key", "revoke", "phone", **here))
    assert "keys.json has no keys" in refusal(clawloop("key", "show", **here))
    (tmp_path / "keys.json").write_text('{"chat": "ck-1", "admin": "ak-1"}')
    assert clawloop("key", "show", **here).stdout.split() == ["chat", "ck-1", "admin", "ak-1"]


def test_draining_the_only_engine_asks_first(here: dict[str, str]) -> None:
    execute(here["DATABASE_URL"], "INSERT INTO engines (id, url) VALUES ('127.0.0.1:1', 'http://127.0.0.1:1')")
    (line,) = clawloop("engine", "list", **here).stdout.splitlines()[1:]
    assert line.split()[:3] == ["127.0.0.1:1", "silent", "yes"]
    asked = clawloop_process("engine", "drain", "127", **here)
    assert asked.returncode == 1
    assert "127.0.0.1:1 is the only engine that takes requests" in asked.stderr
    assert clawloop("engine", "drain", "127", "--yes", **here).stdout == "127.0.0.1:1 gets no new requests.\n"
    undone = json.loads(clawloop("engine", "drain", "127", "--undo", "--json", **here).stdout)
    assert (undone["draining"], undone["healthy"]) == (False, False)


def test_titles_and_ids_of_many_sessions_stay_short(here: dict[str, str]) -> None:
    execute(
        here["DATABASE_URL"],
        "INSERT INTO api_keys (id, policy, name, prefix, secret_sha256, scopes)"
        " VALUES (gen_random_uuid(), 'default', 'k', 'cl-1', '', '{chat}');"
        "INSERT INTO sessions (id, policy, api_key_id, identified_by, state, last_turn_at)"
        " SELECT gen_random_uuid(), 'default', (SELECT id FROM api_keys LIMIT 1), 'conversation', 'open', now()"
        " FROM generate_series(1, 2000)",
    )
    listed = clawloop("session", "list", "--all", **here, COLUMNS="80").stdout.splitlines()
    assert listed[-1] == "20 of 2000, --more"
    assert {len(line.split()[0]) for line in listed[1:-1]} == {8}


def test_the_status_has_ten_lines_at_most(here: dict[str, str], turns: list[TurnRecord]) -> None:
    execute(here["DATABASE_URL"], "UPDATE turns SET entered_at = now() - interval '1 hour'")
    lines = clawloop("status", **here).stdout.splitlines()
    assert len(lines) <= 10
    assert lines[0] == "engines    0 of 0 take requests"
    assert lines[1].startswith("default    v0 answers; waiting: 0 of 16 samples")
    assert lines[2].startswith("sessions   3, 3 not closed yet; the newest turn 2")
    assert "problem    there is no engine: `clawloop engine add URL`" in lines
    assert any("were not notified for over two minutes" in line for line in lines)
    assert json.loads(clawloop("status", "--json", **here).stdout)["sessions"] == 3
    assert clawloop("--version", **here).stdout.startswith("clawloop 0.")
