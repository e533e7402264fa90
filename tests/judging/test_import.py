"""Logs of OpenClaw-RL and exports of our own, imported to a real PostgreSQL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from activities.judging.messages import JudgeTurn
from activities.judging.next_state_lookup import find_next_state
from clawloop.cli.main import app
from clawloop.contracts.turns import TurnOutcome
from clawloop.contracts.views import SessionFilter
from clawloop.ids import TurnId
from clawloop.operations import imports
from clawloop.operations.export import Exporter, ExportFilter, ExportKind, Record
from clawloop.operations.history import HistoryKey
from clawloop.operations.imports import Imported, Importer
from clawloop.recipes.recipe import Recipe
from db.database import Database
from db.erasure import PostgresErasureStore
from db.export import PostgresExportStore
from db.imports import PostgresImportStore
from db.invariants import violations
from db.judging.history import PostgresHistoryStore
from db.judging.judgements import PostgresJudgementStore
from db.judging.rejudging import PostgresRejudgeStore
from db.schema import migrate
from db.serving.directory import ensure_policy
from db.sweep import PostgresSweepStore
from db.training.recipes import ensure_recipe
from db.turns.sessions import PostgresSessionStore
from tests.contract.conftest import TEST_LIMIT
from tests.judging.conftest import Bench

ASKED = ("What is 3 feet?", "In metres, please.", "Thanks!")
TEXTS = ("<think>\nEasy.\n</think>\n\n36 inches.<|im_end|>\n", "0.91 m.<|im_end|>\n")


def original(session: str = "agent:main") -> list[dict[str, Any]]:
    """Two turns as OpenClaw-RL logs them; the third request has come, and its own line has not."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    lines = []
    for n, (said, text) in enumerate(zip(ASKED[:2], TEXTS, strict=True), 1):
        messages = [*messages, {"role": "user", "content": said}]
        lines.append(
            {
                "session_id": session,
                "turn": n,
                "timestamp": "2026-03-14 10:00:00",
                "messages": messages,
                "prompt_text": "…",
                "response_text": text,
                "tool_calls": None,
                "next_state": {"role": "user", "content": ASKED[n]},
            }
        )
        content = text.rpartition("</think>")[2].replace("<|im_end|>", "").strip()
        messages = [*messages, {"role": "assistant", "content": content}]
    return lines


VOTES: list[dict[str, Any]] = [
    {
        "session_id": "agent:main",
        "turn": 1,
        "score": -1.0,
        "votes": [-1, "fail", -1],
        "representative_eval": "Feet.",
    },
    {"session_id": "agent:main", "turn": 2, "score": 1.0, "votes": [1, 1, 0], "representative_eval": "Thanked."},
]
HINT = {
    "session_id": "agent:main",
    "turn": 1,
    "accepted": True,
    "hint": "Answer in metres.",
    "votes": [{"vote_id": 0, "score": 1, "hint": "Answer in metres.", "raw": "…"}],
}


@pytest.fixture
async def empty(empty_postgres_url: str) -> AsyncIterator[Database]:
    """Another installation: its policy `default` has answered nothing yet."""
    await asyncio.to_thread(migrate, empty_postgres_url)
    database = Database(empty_postgres_url, TEST_LIMIT)
    await ensure_policy(database, "default", "tiny", ["qwen3-4b"])
    await ensure_recipe(database, "default", Recipe(name="combined"))
    yield database
    await database.close()


async def imported(
    database: Database, lines: Sequence[Any], problems: list[tuple[str, int, str]] | None = None
) -> Imported:
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]

    def report(name: str, line: int, reason: str) -> None:
        assert problems is not None, (name, line, reason)
        problems.append((name, line, reason))

    return await Importer(PostgresImportStore(database), "default", report).run([("log", _each(raw))])


async def _each(lines: Sequence[bytes]) -> AsyncIterator[bytes]:
    for line in lines:
        yield line


async def exported(database: Database, kind: ExportKind) -> list[Record]:
    pages = Exporter(PostgresExportStore(database)).pages(kind, ExportFilter(), None)
    return [json.loads(json.dumps(record)) async for page in pages for record in page]


async def test_a_log_of_the_original_becomes_a_session_with_next_states(empty: Database) -> None:
    done = await imported(empty, original())
    assert (done.turns, done.known, done.unusable) == (3, 0, 0)
    first, second, third = await exported(empty, ExportKind.TURNS)
    assert (first["session_id"], first["turn"], first["response_text"]) == ("agent:main", 1, "36 inches.")
    assert first["next_state"] == {"role": "user", "content": ASKED[1]}
    assert second["followed_by"] == [{"role": "user", "content": ASKED[2]}]
    assert (third["response_text"], third["next_state"]) == (None, None)
    assert [line["outcome"] for line in (first, second, third)] == ["not_trainable"] * 3
    contexts = PostgresJudgementStore(empty)
    context = await contexts.load_context(TurnId(_uuid(second)))
    assert context is not None
    state = await find_next_state(contexts, context)
    assert state is not None
    assert state.messages == [{"role": "user", "content": ASKED[2]}]


async def test_votes_and_hints_become_judgements(empty: Database) -> None:
    await imported(empty, [*original(), *VOTES])
    first, second = await exported(empty, ExportKind.JUDGEMENTS)
    assert (first["score"], first["votes"], first["representative_eval"]) == (-1, [-1, "fail", -1], "Feet.")
    assert (second["score"], second["votes"], second["reward"]) == (1, [1, 1, 0], 1.0)
    chats = await exported(empty, ExportKind.CHAT)
    assert [line["id"] for line in chats] == [second["id"]]


async def test_hints_of_the_original(empty: Database) -> None:
    await imported(empty, [*original(), HINT])
    (judgement,) = await exported(empty, ExportKind.JUDGEMENTS)
    assert (judgement["accepted"], judgement["hint"], judgement["score"]) == (True, "Answer in metres.", None)


async def test_why_says_that_imported_turns_are_not_trainable_and_what_the_judge_said(empty: Database) -> None:
    await imported(empty, [*original(), *VOTES])
    store = PostgresSessionStore(empty)
    (session,) = await store.sessions(SessionFilter(), after=None, limit=10)
    assert (session.identified_by, session.state, session.closed_why) == ("imported", "closed", "imported")
    views = await store.turns(session.id)
    assert [view.kind_reason for view in views] == ["imported as turn 1", "imported as turn 2", "imported after turn 2"]
    assert views[0].verdict == -1
    assert views[0].why.startswith("not trainable: prompt ids unknown, response ids unknown, log-probs unknown")
    assert views[0].why.endswith("(imported; verdict -1: 2 of 2 votes for -1, 1 missing; no hint)")
    assert views[2].why == "no reply: the log has none"


async def test_importing_again_adds_nothing(empty: Database, empty_postgres_url: str) -> None:
    lines = [*original(), *original("other"), *VOTES]
    first = await imported(empty, lines)
    before = _counts(empty_postgres_url)
    again = await imported(empty, lines)
    assert (again.turns, again.judgements, again.known) == (0, 0, len(lines))
    assert _counts(empty_postgres_url) == before
    assert (first.turns, first.judgements, first.known) == (6, 2, 0)


async def test_a_broken_import_goes_on_where_it_ended(empty: Database) -> None:
    lines = [*original(), *VOTES]
    await imported(empty, lines[:1])
    rest = await imported(empty, lines)
    assert (rest.turns, rest.judgements, rest.known) == (2, 2, 1)
    turns = await exported(empty, ExportKind.TURNS)
    # What was known of the second turn, before its line came, has made way for it.
    assert [(line["response_text"], line["next_state"]) for line in turns] == [
        ("36 inches.", {"role": "user", "content": ASKED[1]}),
        ("0.91 m.", {"role": "user", "content": ASKED[2]}),
        (None, None),
    ]


async def test_more_open_sessions_than_memory_holds_become_the_same(
    empty: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "OPEN_SESSIONS", 1)
    (first, second), (other, later) = original(), original("other")
    await imported(empty, [first, other, second, later])
    for session in ("agent:main", "other"):
        turns = [line for line in await exported(empty, ExportKind.TURNS) if line["session_id"] == session]
        assert [line["response_text"] for line in turns] == ["36 inches.", "0.91 m.", None]
        assert turns[1]["followed_by"] == [{"role": "user", "content": ASKED[2]}]


async def test_a_bad_line_is_reported_and_the_rest_goes_on(empty: Database) -> None:
    first, second = original()
    problems: list[tuple[str, int, str]] = []
    unknown = VOTES[0] | {"session_id": "none"}
    lines = [first, b"\n", b'{"session_id":', second | {"turn": 0}, unknown, second, *VOTES]
    done = await imported(empty, lines, problems)
    assert (done.turns, done.judgements, done.unusable) == (3, 2, 3)
    assert [line for _, line, _ in problems] == [3, 4, 5]
    assert "turn was not imported" in problems[2][2]


async def test_nothing_takes_imported_turns_up_by_itself(empty: Database, empty_postgres_url: str) -> None:
    from datetime import timedelta

    await imported(empty, [*original(), *VOTES])
    sweep = PostgresSweepStore(empty)
    assert await sweep.pending_turns(timedelta(0), 10) == []
    assert await sweep.sessions_left_open(timedelta(0), 10) == []
    assert _counts(empty_postgres_url)["samples"] == 0
    assert [one for one in await violations(empty) if "version 0" not in one.row] == []
    with psycopg.connect(empty_postgres_url) as connection:
        assert connection.execute("SELECT verdict_count FROM policies").fetchone() == (0,)


async def test_another_judge_is_compared_on_imported_turns_and_may_judge_them_again(empty: Database) -> None:
    await imported(empty, [*original(), *VOTES])
    waiting = await PostgresHistoryStore(empty).next_turns(HistoryKey("default", "signal", "judge"), 10)
    assert [turn.verdict for turn in waiting] == [-1, 1]
    facts = await PostgresRejudgeStore(empty).rejudge_facts(waiting[0].turn_id)
    assert facts is not None
    assert (facts.has_follow_up, facts.replied, facts.next_revision) == (True, True, 1)


async def test_text_that_postgres_refuses_is_kept_or_reported(empty: Database) -> None:
    first, second = original("odd \0 name")
    odd = {"role": "user", "content": "nul \0 and \ud800", "name": "\0"}
    lines = [
        first | {"messages": [*first["messages"][:-1], odd], "tools": [{"\0": "\ud800"}]},
        second | {"sampling": {"temperature": float("nan")}},
        second | {"session_id": "\ud800"},
        VOTES[0] | {"session_id": "odd \0 name", "why": "nul \0", "representative_eval": "\ud800\0"},
    ]
    problems: list[tuple[str, int, str]] = []
    done = await imported(empty, lines, problems)
    assert (done.turns, done.judgements) == (2, 1)
    assert [line for _, line, _ in problems] == [2, 3]
    (turn, _) = await exported(empty, ExportKind.TURNS)
    messages: Any = turn["messages"]
    assert messages[-1] == odd
    assert (await imported(empty, lines, problems)).turns == 0


async def test_imported_sessions_are_on_the_page_and_found_by_what_was_said(empty: Database) -> None:
    await imported(empty, [*original(), *VOTES])
    store = PostgresSessionStore(empty)
    for wanted in (
        SessionFilter(text="36 inches"),
        SessionFilter(verdict=-1),
        SessionFilter(policy="default", outcome=TurnOutcome.NOT_TRAINABLE),
    ):
        (found,) = await store.sessions(wanted, after=None, limit=10)
        assert len(await store.turns_from(found.id, 0, 10)) == 3


async def test_our_judge_judges_an_imported_turn_again(bench: Bench) -> None:
    await imported(bench.database, [*original(), *VOTES])
    (session,) = await PostgresSessionStore(bench.database).sessions(SessionFilter(), after=None, limit=10)
    first, *_ = await exported(bench.database, ExportKind.TURNS)
    bench.judge.votes, bench.judge.hint = [1], "Give metres, and nothing else."
    request = JudgeTurn(session_id=session.id, turn_id=TurnId(_uuid(first)), revision=1)
    (result,) = (await bench.judging.judge_turn(request)).fates
    assert (result.verdict, result.outcome, result.sample) == (1, TurnOutcome.NOT_TRAINABLE, False)
    assert result.why.startswith("not trainable: prompt ids unknown")
    assert ASKED[1] in bench.judge.asked("vote")[0]["messages"][-1]["content"]
    assert bench.rows("SELECT * FROM samples") == []


async def test_an_erased_session_is_not_brought_back(empty: Database) -> None:
    await imported(empty, original())
    (session,) = await PostgresSessionStore(empty).sessions(SessionFilter(), after=None, limit=10)
    await PostgresErasureStore(empty).erase_session(session.id)
    problems: list[tuple[str, int, str]] = []
    again = await imported(empty, [*original(), *VOTES], problems)
    assert (again.turns, again.judgements) == (0, 0)
    assert ["was erased" in reason for _, _, reason in problems] == [True, True]
    assert await exported(empty, ExportKind.TURNS) == []


async def test_an_export_survives_the_way_through_an_import(bench: Bench, empty: Database) -> None:
    bench.judge.votes = [-1, -1, 1]
    bench.judge.hint = "Be shorter next time, please."
    records = bench.conversation("turn 0", "turn 1", [{"role": "user", "content": [{"type": "text", "text": "x"}]}])
    session = await bench.insert(*records)
    for record in records:
        await bench.judge_turn(session, record)
    turns, judgements = [await exported(bench.database, kind) for kind in (ExportKind.TURNS, ExportKind.JUDGEMENTS)]
    assert (len(turns), len(judgements)) == (3, 2)
    done = await imported(empty, [*turns, *judgements])
    assert (done.turns, done.judgements) == (3, 2)
    here = {"session", "version", "outcome"}
    for kind, before in ((ExportKind.TURNS, turns), (ExportKind.JUDGEMENTS, judgements)):
        after = await exported(empty, kind)
        assert [_without(line, here) for line in after] == [_without(line, here) for line in before]
    for kind in (ExportKind.CHAT, ExportKind.PREFERENCE):
        assert await exported(empty, kind) == await exported(bench.database, kind)


async def test_the_id_of_a_turn_that_was_answered_here_is_refused(bench: Bench) -> None:
    (record,) = bench.conversation("one")
    await bench.insert(record)
    problems: list[tuple[str, int, str]] = []
    done = await imported(bench.database, await exported(bench.database, ExportKind.TURNS), problems)
    assert (done.turns, done.unusable) == (0, 1)
    assert "not imported to this session" in problems[0][2]
    assert len(await exported(bench.database, ExportKind.TURNS)) == 1


async def test_the_command(empty: Database, empty_postgres_url: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("DATABASE_URL", empty_postgres_url)
    turns, votes = tmp_path / "record.jsonl", tmp_path / "record_prm.jsonl"
    turns.write_text("".join(json.dumps(line) + "\n" for line in original()))
    votes.write_text("".join(json.dumps(line) + "\n" for line in VOTES))
    runner = CliRunner()
    run = ["import", str(turns), str(votes), "--data", str(tmp_path)]
    result = await asyncio.to_thread(runner.invoke, app, run)
    assert (result.exit_code, result.output) == (
        0,
        "Imported 3 turns and 2 judgements; 0 were there already.\n",
    )
    with turns.open("a") as file:
        file.write("{}\n")
    result = await asyncio.to_thread(runner.invoke, app, run)
    assert result.exit_code == 1
    assert f"{turns}:3: neither a turn" in result.output
    assert "0 turns and 0 judgements; 4 were there already" in result.output
    nowhere = await asyncio.to_thread(runner.invoke, app, [*run, "--policy", "none"])
    assert "no policy 'none'" in str(nowhere.exception)


def _uuid(line: Record) -> Any:
    from uuid import UUID

    return UUID(str(line["id"]))


def _without(line: Record, names: set[str]) -> Record:
    return {name: value for name, value in line.items() if name not in names}


def _counts(url: str) -> dict[str, int]:
    tables = ("turns", "sessions", "judgements", "votes", "hints", "samples", "api_keys")
    counts = {}
    with psycopg.connect(url) as connection:
        for table in tables:
            row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
            assert row is not None
            counts[table] = row[0]
    return counts
