"""With keys, nothing that was said stands in the database or the data folder; everything reads as it was written."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import psycopg
import pytest
from sqlalchemy import JSON, LargeBinary, Text
from sqlalchemy.types import ARRAY

from api.app import create_app
from api.dependencies import Services
from api.http_protocol import BoundedHttpProtocol
from api.recording.spool import Spool
from clawloop.app.local import parts
from clawloop.app.local.parts import Deployment
from clawloop.app.processes.database import compare_keys, require_marked_keys, write_mark
from clawloop.app.processes.gateway import GatewayOptions, gateway_services
from clawloop.app.processes.operations import DatabaseCheck
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.turns import Message
from clawloop.core.contracts.views import SessionFilter
from clawloop.core.encryption.key_file import SETTING, add_key, make_keys
from clawloop.core.encryption.sealer import Sealer
from clawloop.core.errors import ContentUnreadable, EncryptionKeyMissing, RecordUnusable, SetupError, StateConflict
from clawloop.core.settings import Settings
from clawloop.environments.artifacts import ArtifactFolder
from db.content import PLAIN, ExactJson
from db.encryption.columns import PLAIN_COLUMNS, SEALED_TABLES, TOOL_LISTS
from db.erasure import PostgresErasureStore
from db.serving.engines import add_engine
from db.serving.keys import PostgresKeyStore
from db.tables import Base
from db.turns.insert import PostgresTurnStore
from db.turns.sessions import PostgresSessionStore
from tests.contract.learning import POLICY
from tests.fakes.engine import fake_engine, serving
from tests.records import turn_record
from tests.security.encrypted import (
    FAULT,
    HINT,
    SAY,
    SYSTEM,
    VOTE,
    Loop,
    codec,
    content_found_in,
    dump,
    opened,
    require_clean,
    require_readable,
    whole_loop,
)
from tests.ui.conftest import PATIENT, Visitor


def test_every_column_of_text_json_or_bytes_was_decided_upon() -> None:
    """A new column that may hold content must be encrypted, or be named among those that hold none."""
    undecided, gone = [], []
    sealed = {(table.name, column) for table in (*SEALED_TABLES, TOOL_LISTS) for column in table.columns}
    plain = {(table, column) for table, columns in PLAIN_COLUMNS.items() for column in columns.split()}
    existing = set()
    for table in Base.metadata.sorted_tables:
        for column in table.columns:
            existing.add((table.name, column.name))
            holds = isinstance(column.type, Text | ExactJson | JSON | LargeBinary | ARRAY)
            if holds and (table.name, column.name) not in sealed | plain:
                undecided.append((table.name, column.name))
    gone = sorted((sealed | plain) - existing)
    assert (undecided, gone, sealed & plain) == ([], [], set())


async def test_nothing_of_a_whole_loop_stands_in_the_database(loop: Loop, postgres_url: str) -> None:
    assert content_found_in(dump(postgres_url)) == []
    async with opened(postgres_url, loop.database.content) as database:
        await require_readable(database, loop)
        await require_clean(database)


async def test_the_loop_without_keys_is_found_in_the_dump(postgres_url: str) -> None:
    """What the test above looks for is what a plain database holds."""
    loop = await whole_loop(postgres_url, PLAIN)
    await loop.database.close()
    assert len(content_found_in(dump(postgres_url))) >= 15


async def test_chats_pages_and_exports_work_on_encrypted_content(
    loop: Loop, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("CHAT_LIMIT", "PAGE_LIMIT"):  # on a busy machine a statement takes longer
        monkeypatch.setattr(f"clawloop.app.processes.gateway.{limit}", PATIENT)
    keys = PostgresKeyStore(loop.database)
    _, secret = await keys.create_key(POLICY, {Scope.CHAT, Scope.ADMIN}, "all")
    settings = Settings.model_validate(
        {"DATABASE_URL": postgres_url, "data": tmp_path, "encryption_key_file": tmp_path / "keys"}
    )

    @asynccontextmanager
    async def services() -> AsyncIterator[Services]:
        async with AsyncExitStack() as stack:
            with socket.socket() as listener:
                options = GatewayOptions(listener=listener)
                yield await gateway_services(stack, postgres_url, settings, options, lambda: False)

    async with fake_engine() as engine:
        await add_engine(loop.database, engine.url)
        async with serving(create_app(services), http=BoundedHttpProtocol) as url:
            async with httpx.AsyncClient(base_url=url, headers={"x-api-key": secret}, timeout=60) as client:
                said: list[Message] = [{"role": "user", "content": f"Tell {SAY}"}]
                session = ""
                for _ in range(2):
                    body = {"model": "policy", "messages": said}
                    answer = await client.post("/v1/chat/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    session = answer.headers["x-clawloop-session"]
                    said = [*said, answer.json()["choices"][0]["message"], {"role": "user", "content": "Again"}]
                shown = (await client.get(f"/admin/v1/sessions/{session}")).json()
                assert len(shown["turns"]) == 2  # found by keyed digests of what was said
                for path in (f"/admin/v1/turns/{loop.turn}/why", f"/admin/v1/turns/{loop.turn}?tokens=true"):
                    assert HINT in (await client.get(path)).text, path
                for kind, word in (("turns", SYSTEM), ("judgements", VOTE)):
                    exported = await client.get("/admin/v1/export", params={"records": kind})
                    assert word in exported.text, kind
            async with httpx.AsyncClient(base_url=url, timeout=60) as browser:
                visitor = Visitor(browser)
                await visitor.log_in(secret)
                assert SAY in await visitor.get("/ui/sessions")
                assert HINT in await visitor.get("/ui/versions/1")
                refused = await browser.get("/ui/sessions", params={"text": SAY})
                assert refused.status_code == 409
                assert SETTING in refused.text
    assert [name for name in content_found_in(dump(postgres_url)) if name != "hinted ids"] == []


async def test_text_is_not_searched_and_the_error_names_the_setting(loop: Loop) -> None:
    with pytest.raises(StateConflict, match=SETTING) as refused:
        await PostgresSessionStore(loop.database).sessions(SessionFilter(text=SAY), after=None, limit=10)
    assert (refused.value.code, refused.value.field) == ("search_is_off", "text")


async def test_a_value_that_is_moved_to_another_row_or_changed_is_refused(loop: Loop, postgres_url: str) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        swap = "UPDATE turns SET response = (SELECT o.response FROM turns o WHERE o.id = %s) WHERE id = %s"
        connection.execute(swap, (loop.next_turn, loop.turn))
        connection.execute("UPDATE votes SET raw = left(raw, -8) || 'AAAAAAA=' WHERE index = 1")
    async with opened(postgres_url, loop.database.content) as database:
        with pytest.raises(ContentUnreadable, match=f"turns.response of {loop.turn} was changed"):
            await PostgresTurnStore(database).load(loop.turn)
        report = await DatabaseCheck(database, Path("none")).report(files=True)
        found = [broken.row for broken in report.violations]
        assert any(f"turns.response of {loop.turn}" in row for row in found)
        assert any("votes.raw of" in row for row in found)
        # A list of sessions shows all others.
        shown = await PostgresSessionStore(database).sessions(SessionFilter(), after=None, limit=50)
        assert len(shown) == 5


async def test_a_process_without_the_keys_or_with_others_is_refused(
    loop: Loop, postgres_url: str, tmp_path: Path
) -> None:
    async with opened(postgres_url) as database:
        with pytest.raises(SetupError, match=f"is encrypted: set {SETTING}"):
            await database.compare_keys()
    async with opened(postgres_url, codec(tmp_path, "others")) as database:
        with pytest.raises(SetupError, match=f"{SETTING}: the file lacks the key"):
            await PostgresTurnStore(database).load(loop.turn)
    lines = (tmp_path / "keys").read_text().splitlines()
    other = next(line for line in (tmp_path / "others").read_text().splitlines() if line.startswith("digests"))
    mixed = tmp_path / "mixed"
    mixed.write_text("\n".join([other, *(line for line in lines if line.startswith("key"))]))
    mixed.chmod(0o600)
    async with opened(postgres_url, codec(tmp_path, "mixed")) as database:
        with pytest.raises(SetupError, match="line `digests` differs"):
            await database.compare_keys()


def test_a_command_and_a_gateway_without_the_keys_end_with_one_line(
    loop: Loop, postgres_url: str, tmp_path: Path
) -> None:
    environment = {"DATABASE_URL": postgres_url, "CLAWLOOP_DATA": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for words in (["status"], ["gateway", "--port", "0"]):
        ended = subprocess.run(
            [Path(".venv/bin/clawloop").absolute(), *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 1, (words, ended)
        assert ended.stderr.splitlines()[-1] == (f"clawloop: this database is encrypted: set {SETTING} to its key file")


async def test_an_erasure_reaches_what_repeats_the_erased_messages(loop: Loop, postgres_url: str) -> None:
    erased = await PostgresErasureStore(loop.database).erase_turn(loop.turn)
    assert erased is not None
    assert erased.turns == 3  # and those that continue it
    stored = await PostgresTurnStore(loop.database).load(loop.next_turn)
    assert stored is not None
    assert stored.record.messages == []


def test_spooled_turns_are_encrypted_and_bound_to_their_file(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    sealer = Sealer(tmp_path / "keys")
    first, second = turn_record(SAY, error=FAULT), turn_record(SAY)
    plain = Spool(tmp_path / "spool", 10**6)
    plain.write(second)
    plain.close()
    spool = Spool(tmp_path / "spool", 10**6, sealer=sealer)
    spool.write(first)
    rejected = spool.write_rejected(first)
    assert (spool.read(first.turn_id), spool.read(second.turn_id)) == (first, second)
    files = {path.stem: path for path in (tmp_path / "spool" / "gateway-0").glob("*.json")}
    for path in (files[str(first.turn_id)], rejected):
        assert SAY.encode() not in path.read_bytes()
    files[str(first.turn_id)].replace(files[str(second.turn_id)])
    with pytest.raises(ContentUnreadable, match="belongs to another place"):
        spool.read(second.turn_id)
    spool.close()
    without = Spool(tmp_path / "spool", 10**6)
    with pytest.raises(EncryptionKeyMissing, match=SETTING):
        without.read(second.turn_id)
    without.close()


async def test_artifacts_are_encrypted_and_named_by_a_keyed_digest(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    artifacts = ArtifactFolder(tmp_path / "artifacts", Sealer(tmp_path / "keys"))
    plain = ArtifactFolder(tmp_path / "artifacts")
    before, digest = await plain.store(SAY.encode()), await artifacts.store(SAY.encode())
    assert await artifacts.load(digest) == await artifacts.load(before) == SAY.encode()
    stored = next((tmp_path / "artifacts").glob(f"??/{digest}.tar"))
    assert SAY.encode() not in stored.read_bytes()
    with pytest.raises(RecordUnusable, match=SETTING):
        await plain.load(digest)
    add_key(tmp_path / "keys")
    rotated = ArtifactFolder(tmp_path / "artifacts", Sealer(tmp_path / "keys"))
    other = await plain.store(SYSTEM.encode())
    for one in (digest, before, other):
        assert rotated.reseal(one)
    assert not any(rotated.reseal(one) for one in rotated.digests())
    files = [path.read_bytes() for path in (tmp_path / "artifacts").rglob("*.tar")]
    assert len(files) == 2
    assert not any(SAY.encode() in file or SYSTEM.encode() in file for file in files)
    # Who knows an artifact by its old digest finds it.
    assert await rotated.load(digest) == await rotated.load(before) == SAY.encode()
    assert await rotated.load(other) == SYSTEM.encode()
    (tmp_path / "artifacts" / "ab").mkdir(exist_ok=True)
    (tmp_path / "artifacts" / "ab" / f"ab{'0' * 62}.tar").write_bytes(b"damaged")
    with pytest.raises(RecordUnusable, match="damaged"):
        rotated.reseal(f"ab{'0' * 62}")
    await rotated.delete(other)  # by its digest from before it was encrypted
    assert digest in rotated.digests()
    with pytest.raises(RecordUnusable, match="is not in"):
        await rotated.load(other)


def test_the_spools_mark_keeps_other_keys_out_while_postgres_is_away(tmp_path: Path) -> None:
    right, other = codec(tmp_path), codec(tmp_path, "others")
    spool = tmp_path / "spool"
    require_marked_keys(spool, PLAIN)
    write_mark(spool, right)
    require_marked_keys(spool, right)
    before = (spool / "encryption").read_bytes()
    write_mark(spool, right)  # nothing has to be written, as may be impossible on a full disk
    assert (spool / "encryption").read_bytes() == before
    for wrong in (PLAIN, other):
        with pytest.raises(SetupError, match=SETTING):
            require_marked_keys(spool, wrong)
    write_mark(spool, PLAIN)  # PostgreSQL says that nothing is encrypted any more
    require_marked_keys(spool, PLAIN)


async def test_a_gateway_that_began_without_postgres_ends_when_it_finds_other_keys(
    loop: Loop, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, number: ended.append((process, number)))
    for content in (loop.database.content, PLAIN, codec(tmp_path, "others")):
        async with opened(postgres_url, content) as database:
            await compare_keys(database)
    assert ended == [(os.getpid(), signal.SIGTERM)] * 2


def test_every_process_that_up_starts_gets_the_file(tmp_path: Path) -> None:
    deployment = Deployment(
        tmp_path, "postgresql://x/y", "127.0.0.1:1", (), "tiny", (), {}, encryption_key_file=tmp_path / "keys",
        sandboxed="http://127.0.0.1:1", local_engines=("http://127.0.0.1:2",),
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as listener:
        started = [
            *parts.gateways(deployment, listener, 2, {}),
            *parts.workers(deployment, {}),
            parts.trainer(tmp_path, deployment, {}),
        ]
        assert len(started) == 7
        for part in started:
            assert part.prepare().environment[SETTING] == str(tmp_path / "keys"), part.name
