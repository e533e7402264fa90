"""`clawloop up` with real parts only: PostgreSQL, Temporal, vLLM, gateway and workers."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import httpx
import psutil
import psycopg
import pytest
from openai import APIError, OpenAI, Stream
from openai.types.chat import ChatCompletionChunk

from clawloop.app.local.services.postgres import running_postgres
from clawloop.app.processes.endpoints import read_runtime_file
from clawloop.core.ids import turn_id_of
from tests.e2e.up import Up, up
from tests.processes import alive, by_name

# The timeout includes the start of an engine.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

# A busy machine takes several times the documented 20 s.
STOP_SECONDS = 60


def test_it_serves_and_records_and_stops_recording_the_stream_it_cuts(tmp_path: Path) -> None:
    with up(tmp_path / "data", tmp_path / "up.log") as started:
        _check(started)


def _check(started: Up) -> None:
    data = started.data
    url = started.line(r"gateway +(http://127\.0\.0\.1:\d+/v1)$")
    temporal_ui = started.line(r"Temporal UI +(http://\S+)$")
    started.line("(vllm ready) at ")
    keys = json.loads((data / "keys.json").read_text())
    addresses = read_runtime_file(data)
    assert addresses is not None
    with OpenAI(base_url=url, api_key=keys["chat"], max_retries=0, timeout=60) as client:
        with _stream(client, max_tokens=24) as answer:
            chunks = list(answer)
        reply = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        with psycopg.connect(addresses.database_url) as connection:
            connection.autocommit = True
            deadline = time.monotonic() + 60  # a turn that PostgreSQL did not take at once waits in the spool
            while (status := _status(connection, chunks[0].id)) is None:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert status == "length"
            assert _reply(connection, chunks[0].id) == reply
        with urllib.request.urlopen(temporal_ui, timeout=60) as page:
            assert page.status == 200

        descendants = psutil.Process(started.process.pid).children(recursive=True)
        assert {"temporal", "postgres"} <= by_name(descendants).keys()
        assert data.stat().st_mode & 0o077 == 0
        engine = started.line(r"vllm ready at (http://127\.0\.0\.1:\d+)")
        _check_guard(engine, data)
        assert [path for path in data.rglob("*") if path.lstat().st_mode & 0o022 and not path.is_symlink()] == []
        with _stream(client, max_tokens=20_000) as answer:
            cut_id = next(answer).id
            next(answer)
            started.process.send_signal(signal.SIGINT)
            _read_to_the_end(answer)
        assert started.process.wait(STOP_SECONDS) == 0
    assert alive(descendants) == []
    assert _stored_status(data, cut_id) == "aborted"


def _check_guard(engine: str, data: Path) -> None:
    """A stranger on the machine gets nothing, and even Clawloop loads nothing from elsewhere."""
    secret = {"Authorization": f"Bearer {(data / 'engine-secret').read_text().strip()}"}
    load = {"lora_name": "x", "lora_path": "/etc"}
    assert httpx.get(f"{engine}/v1/models", timeout=120).status_code == 401
    assert httpx.get(f"{engine}/v1/models", timeout=120, headers=secret).status_code == 200
    assert httpx.get(f"{engine}/health", timeout=120, headers={"Host": "evil.example"}).status_code == 421
    assert httpx.post(f"{engine}/v1/load_lora_adapter", timeout=120, headers=secret, json=load).status_code == 403


def _stream(client: OpenAI, max_tokens: int) -> Stream[ChatCompletionChunk]:
    return client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": "Tell me a tale."}],
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def _read_to_the_end(answer: Stream[ChatCompletionChunk]) -> None:
    """Read until the stream ends or breaks, as a client does."""
    with suppress(APIError, httpx.TransportError):
        for _ in answer:
            pass


def _status(connection: psycopg.Connection, response_id: str) -> str | None:
    row = connection.execute("SELECT status FROM turns WHERE id = %s", [turn_id_of(response_id)]).fetchone()
    return None if row is None else str(row[0])


def _reply(connection: psycopg.Connection, response_id: str) -> object:
    query = "SELECT response ->> 'content' FROM turns WHERE id = %s"
    row = connection.execute(query, [turn_id_of(response_id)]).fetchone()
    return None if row is None else row[0]


def _stored_status(data: Path, response_id: str) -> str | None:
    """Status of a turn after its gateway has ended, from the spool or from PostgreSQL."""
    turn_id = turn_id_of(response_id)
    assert isinstance(turn_id, UUID)
    for spooled in (data / "spool").glob(f"gateway-*/{turn_id}.json"):
        return str(json.loads(spooled.read_text())["status"])
    with running_postgres(data / "postgres") as server, psycopg.connect(server.url) as connection:
        return _status(connection, response_id)
