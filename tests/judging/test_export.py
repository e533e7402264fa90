"""What was recorded and judged, exported from a real PostgreSQL and continued."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from typer.testing import CliRunner

from clawloop.app.cli.main import app
from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.errors import NotFound
from clawloop.core.ids import SessionId
from clawloop.operations import export
from clawloop.operations.export import Exporter, ExportFilter, ExportKind, Record
from db.erasure import PostgresErasureStore
from db.export import PostgresExportStore
from tests.judging.conftest import Bench


async def judged(bench: Bench, verdict: int = 1, named: str = "s") -> tuple[SessionId, list[TurnRecord]]:
    """A session of three turns, of which two have this verdict."""
    bench.judge.votes = [verdict]
    records = bench.conversation("turn 0", "turn 1", "turn 2", session=named)
    session = await bench.insert(*records)
    for record in records:
        await bench.judge_turn(session, record)
    return session, records


async def exported(
    bench: Bench, kind: ExportKind, wanted: ExportFilter | None = None, after: UUID | None = None
) -> list[Record]:
    pages = Exporter(PostgresExportStore(bench.database)).pages(kind, wanted or ExportFilter(), after)
    return [json.loads(json.dumps(record)) async for page in pages for record in page]


async def test_turns_come_with_what_followed_them(binary_bench: Bench) -> None:
    session, records = await judged(binary_bench)
    first, second, third = await exported(binary_bench, ExportKind.TURNS)
    assert [line["id"] for line in (first, second, third)] == [str(record.turn_id) for record in records]
    assert (first["session"], first["turn"], third["turn"]) == (str(session), 1, 3)
    assert first["messages"] == records[0].messages
    assert records[0].response is not None
    assert first["response_text"] == records[0].response["content"]
    assert first["next_state"] == {"role": "user", "content": "turn 1"}
    assert (third["next_state"], third["followed_by"]) == (None, [])


async def test_judgements_chats_and_preferences_tell_the_verdict(binary_bench: Bench) -> None:
    _, records = await judged(binary_bench)
    judgements = await exported(binary_bench, ExportKind.JUDGEMENTS)
    assert [(line["id"], line["score"]) for line in judgements] == [(str(record.turn_id), 1) for record in records[:2]]
    votes: Any = judgements[0]["votes"]
    assert set(votes) == {1}
    assert judgements[0]["representative_eval"]
    chats, preferences = [await exported(binary_bench, kind) for kind in (ExportKind.CHAT, ExportKind.PREFERENCE)]
    assert [line["messages"] for line in chats] == [[*record.messages, record.response] for record in records[:2]]
    assert [(line["prompt"], line["completion"], line["label"]) for line in preferences] == [
        (record.messages, [record.response], True) for record in records[:2]
    ]


async def test_a_blamed_reply_is_a_preference_and_no_chat(binary_bench: Bench) -> None:
    await judged(binary_bench, verdict=-1)
    assert await exported(binary_bench, ExportKind.CHAT) == []
    assert [line["label"] for line in await exported(binary_bench, ExportKind.PREFERENCE)] == [False, False]


async def test_samples_name_their_turns(binary_bench: Bench) -> None:
    session, records = await judged(binary_bench)
    samples = await exported(binary_bench, ExportKind.SAMPLES)
    assert {(line["hinted"], line["hint_source"]) for line in samples} == {(False, None)}
    assert {line["turn"] for line in samples} == {str(record.turn_id) for record in records[:2]}
    assert {(line["session"], line["state"], line["step"]) for line in samples} == {(str(session), "fresh", None)}
    assert await exported(binary_bench, ExportKind.STEPS) == []


async def test_filters_and_pages_and_continuing(binary_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "PAGE", 2)
    session, records = await judged(binary_bench)
    other, _ = await judged(binary_bench, named="other")
    everything = await exported(binary_bench, ExportKind.TURNS)
    assert len(everything) == 6
    assert await exported(binary_bench, ExportKind.TURNS, after=records[1].turn_id) == everything[2:]
    assert await exported(binary_bench, ExportKind.TURNS, ExportFilter(session=session)) == everything[:3]
    with pytest.raises(NotFound, match="policy 'other"):
        await exported(binary_bench, ExportKind.TURNS, ExportFilter(policy="other\0"))
    began = records[0].started_at
    assert await exported(binary_bench, ExportKind.TURNS, ExportFilter(until=began)) == []
    assert len(await exported(binary_bench, ExportKind.TURNS, ExportFilter(since=began))) == 6
    await PostgresErasureStore(binary_bench.database).erase_session(other)
    assert await exported(binary_bench, ExportKind.TURNS) == everything[:3]


async def test_the_command_continues_a_file(
    binary_bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, records = await judged(binary_bench)
    monkeypatch.setenv("DATABASE_URL", binary_bench.url)
    out = tmp_path / "turns.jsonl"
    run = ["export", "--out", str(out), "--data", str(tmp_path)]
    runner = CliRunner()
    assert (await asyncio.to_thread(runner.invoke, app, run)).exit_code == 0
    whole = out.read_bytes()
    assert [json.loads(line)["id"] for line in whole.splitlines()] == [str(record.turn_id) for record in records]
    out.write_bytes(whole[: len(whole) // 2])
    again = await asyncio.to_thread(runner.invoke, app, run)
    assert (again.exit_code, again.stderr.endswith(" more\n")) == (0, True)
    assert out.read_bytes() == whole
