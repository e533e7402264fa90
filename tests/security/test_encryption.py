"""With keys, nothing that was said stands in the database or the data folder; keys change while it runs."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path

import httpx
import psycopg
import pytest
from sqlalchemy import JSON, LargeBinary, Text
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import ARRAY

from activities.training.train_step import LOST_ATTEMPTS, TrainingActivities, TrainStep
from api.app import create_app
from api.dependencies import Services
from api.http_protocol import BoundedHttpProtocol
from api.recording.spool import Spool
from clawloop.app.local import parts
from clawloop.app.local.parts import Deployment
from clawloop.app.processes.database import compare_keys, require_marked_keys, write_mark
from clawloop.app.processes.gateway import GatewayOptions, gateway_services
from clawloop.app.processes.operations import DatabaseCheck
from clawloop.core.contracts.episodes import Ending, EpisodeEnd, EpisodeScore, GroupState
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import Message
from clawloop.core.contracts.views import SessionFilter
from clawloop.core.encryption.key_file import SETTING, add_key, make_keys
from clawloop.core.encryption.sealer import Sealer
from clawloop.core.errors import (
    ContentUnreadable,
    EncryptionKeyMissing,
    RecordUnusable,
    SetupError,
    StateConflict,
    StoreUnavailable,
    TransientError,
)
from clawloop.core.ids import SessionId, new_turn_id
from clawloop.core.settings import Settings
from clawloop.environments.artifacts import ArtifactFolder
from db.content import PLAIN, ContentCodec, ExactJson
from db.database import Database
from db.encryption import rotation
from db.encryption import rotation as rotation_module
from db.encryption.columns import PLAIN_COLUMNS, SEALED_TABLES, TOOL_LISTS, Form
from db.encryption.rotation import rotate
from db.episodes.groups import PostgresEpisodeStore
from db.erasure import PostgresErasureStore
from db.serving.engines import add_engine
from db.serving.keys import PostgresKeyStore
from db.tables import Base
from db.training.steps import PostgresStepStore
from db.turns.files import PostgresFileStore
from db.turns.insert import PostgresTurnStore
from db.turns.read import ConversationCache
from db.turns.sessions import PostgresSessionStore
from tests.contract.conftest import TEST_LIMIT
from tests.contract.episodes import LIFETIME, add_turns, new_group
from tests.contract.learning import POLICY, PostgresLearning, recipe
from tests.fakes.engine import fake_engine, serving
from tests.fakes.trainer import FakeTrainer
from tests.pictures import asks_about
from tests.records import turn_record
from tests.security.encrypted import (
    ANSWER,
    FAULT,
    HINT,
    NAMED,
    PICTURE,
    SAY,
    SYSTEM,
    TOOLS,
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

# With keys, nothing that was said stands in the database or the data folder; everything reads as it was written.


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
        assert len(started) == 5
        for part in started:
            assert part.prepare().environment[SETTING] == str(tmp_path / "keys"), part.name


# Content is encrypted beside plain content, by one key after another, and decrypted again.


async def test_a_process_that_ran_before_without_keys_stores_no_plain_content(
    postgres_url: str, tmp_path: Path
) -> None:
    async with opened(postgres_url) as before:
        loop = await whole_loop(postgres_url, PLAIN)
        await loop.database.close()
        await before.compare_keys()
        async with opened(postgres_url, codec(tmp_path)) as encrypted:
            await encrypted.compare_keys()
            with pytest.raises(StoreUnavailable, match=f"is encrypted: set {SETTING}"):
                await PostgresTurnStore(before).insert(turn_record(api_key_id=loop.learning.key))
            # Rows from before may be changed as long as their content is not.
            session = (await PostgresTurnStore(encrypted).load(loop.turn)).session_id  # type: ignore[union-attr]
            assert (await PostgresErasureStore(before).erase_session(SessionId(session))) is not None


async def test_old_rows_are_read_beside_new_ones_and_rotation_encrypts_them(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation_module, "_WINDOW_ROWS", 2)
    loop = await whole_loop(postgres_url, PLAIN)
    await loop.database.close()
    async with opened(postgres_url, codec(tmp_path)) as database:
        await require_readable(database, loop)
        after = turn_record(
            api_key_id=loop.learning.key,
            evidence=NAMED,
            messages=[*(await messages_of(database, loop)), ANSWER, {"role": "user", "content": f"More {SAY}"}],
            tools=TOOLS,
        )
        inserted = await PostgresTurnStore(database).insert(after)
        assert inserted.parent_turn_id == loop.next_turn  # by the plain digest of the reply before
        report = await DatabaseCheck(database, Path("none")).report(files=False)
        assert any("rows of turns are plain" in broken.row for broken in report.violations)

        done = await rotate(database)
        assert done.unreadable == []
        assert content_found_in(dump(postgres_url)) == []
        await require_clean(database)
    async with opened(postgres_url, codec(tmp_path)) as database:
        await require_readable(database, loop)
        again = await rotate(database)
        assert sum(again.rows.values()) == 0
        later = dataclasses.replace(turn_record(api_key_id=loop.learning.key), evidence=NAMED, messages=after.messages)
        inserted = await PostgresTurnStore(database).insert(later)
        assert inserted.parent_turn_id == loop.next_turn  # by the keyed one


async def messages_of(database: Database, loop: Loop) -> list[Message]:
    stored = await PostgresTurnStore(database, ConversationCache()).load(loop.next_turn)
    assert stored is not None
    return list(stored.record.messages)


async def test_a_conversation_without_a_name_goes_on_over_the_rotation(postgres_url: str, tmp_path: Path) -> None:
    loop = await whole_loop(postgres_url, PLAIN)
    await loop.database.close()

    def turn(messages: list[Message]) -> Message:
        return {"role": "user", "content": f"turn {len(messages)}"}

    messages: list[Message] = []
    sessions = set()

    async def chat(content: ContentCodec) -> None:
        nonlocal messages
        async with opened(postgres_url, content) as database:
            messages = [*messages, turn(messages)]
            record = turn_record(api_key_id=loop.learning.key, messages=messages, response=ANSWER)
            sessions.add((await PostgresTurnStore(database).insert(record)).session_id)
            messages = [*messages, ANSWER]

    await chat(PLAIN)
    await chat(codec(tmp_path))
    async with opened(postgres_url, codec(tmp_path)) as database:
        await rotate(database)
    await chat(codec(tmp_path))
    add_key(tmp_path / "keys")
    await chat(codec(tmp_path))
    assert len(sessions) == 1


async def test_an_interrupted_rotation_to_a_new_key_goes_on_and_the_old_key_may_go(
    loop: Loop, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    old = path.read_text().splitlines()[-1]
    add_key(path)
    monkeypatch.setattr(rotation, "_BATCH_ROWS", 1)
    monkeypatch.setattr(rotation_module, "_WINDOW_ROWS", 2)

    class Killed(Exception):
        pass

    def die(table: str, rows: int) -> None:
        if table == "votes":
            raise Killed

    async with opened(postgres_url, codec(tmp_path)) as database:
        with pytest.raises(Killed):
            await rotate(database, told=die)
    # A process that began before reads the new key from the file.
    await require_readable(loop.database, loop)
    async with opened(postgres_url, codec(tmp_path)) as database:
        await require_readable(database, loop)
        done = await rotate(database)
        assert done.rows["votes"] > 0
        assert done.rows["turns"] == 0
    path.write_text("\n".join(line for line in path.read_text().splitlines() if line != old))
    async with opened(postgres_url, codec(tmp_path)) as database:
        await require_readable(database, loop)
        await require_clean(database)


async def test_decrypting_ends_the_encryption(loop: Loop, postgres_url: str, tmp_path: Path) -> None:
    async with opened(postgres_url, codec(tmp_path)) as database:
        await rotate(database, decrypt=True)
    await loop.database.close()
    async with opened(postgres_url) as database:
        await require_readable(database, loop)
        await PostgresTurnStore(database).insert(turn_record(api_key_id=loop.learning.key))
        assert await PostgresSessionStore(database).sessions(SessionFilter(text=SAY), after=None, limit=10)


def test_the_forms_of_all_columns_are_rotated() -> None:
    assert {form for table in SEALED_TABLES for form in table.columns.values()} == set(Form)


async def test_the_command_rotates_rows_spooled_turns_and_artifacts(
    loop: Loop, postgres_url: str, tmp_path: Path
) -> None:
    sealer = Sealer(tmp_path / "keys")
    turn = turn_record(SAY)
    spool = Spool(tmp_path / "spool", 10**6, sealer=sealer)
    rejected = spool.write_rejected(turn)
    spool.write(turn)  # its gateway was stopped before PostgreSQL took it
    spool.close()
    waiting = rejected.parent.parent / rejected.name
    artifacts = ArtifactFolder(tmp_path / "artifacts", sealer)
    digest = await artifacts.store(SAY.encode())
    plain = await ArtifactFolder(tmp_path / "artifacts").store(FAULT.encode())  # from before
    files = [rejected, waiting, next((tmp_path / "artifacts").glob(f"??/{digest}.tar"))]
    for file in files:
        os.chown(file, os.getuid() or 10_001, os.getgid() or 10_001)  # not root's, where root runs the command
    owners = [(file.stat().st_uid, file.stat().st_gid) for file in files]
    environment = {"DATABASE_URL": postgres_url, "CLAWLOOP_DATA": str(tmp_path), SETTING: str(tmp_path / "keys")}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "clawloop.app.cli.main", "encryption", *words]
        environment_of_all = {"PATH": "/usr/bin:/bin"} | environment
        return subprocess.run(command, env=environment_of_all, capture_output=True, text=True, check=True).stdout

    assert "has 2 keys" in run("key", str(tmp_path / "keys"), "--add")
    told = json.loads(run("rotate", "--json"))
    assert (told["files"], told["unreadable"]) == (4, [])
    assert told["rows"]["turns"] > 0
    new = Sealer(tmp_path / "keys")
    for file in (rejected, waiting):
        assert file.read_bytes().startswith(new.head)
    assert await ArtifactFolder(tmp_path / "artifacts", new).load(digest) == SAY.encode()
    assert await ArtifactFolder(tmp_path / "artifacts", new).load(plain) == FAULT.encode()
    assert not any(FAULT.encode() in path.read_bytes() for path in (tmp_path / "artifacts").glob("??/*.tar"))
    assert [(file.stat().st_uid, file.stat().st_gid) for file in files] == owners
    assert json.loads(run("rotate", "--json"))["files"] == 0
    await loop.database.close()
    assert "takes plain content now" in run("rotate", "--decrypt")
    without = Spool(tmp_path / "spool", 10**6)
    assert without.read(turn.turn_id) == turn
    without.close()
    assert SAY in rejected.read_text()


async def test_a_file_is_stored_once_over_the_rotation_and_back(postgres_url: str, tmp_path: Path) -> None:
    loop = await whole_loop(postgres_url, PLAIN)
    await loop.database.close()

    async def show(content: ContentCodec) -> int:
        """Show the loop's picture in a session of its own; how many files are stored then."""
        async with opened(postgres_url, content) as database:
            asked = turn_record(api_key_id=loop.learning.key, messages=[asks_about(PICTURE, new_turn_id().hex)])
            session = (await PostgresTurnStore(database).insert(asked)).session_id
            name = sha256(PICTURE).hexdigest()
            assert await PostgresFileStore(database).of_session(session, {name}) == {name: PICTURE}
            return await database.run(count_files)

    assert await show(PLAIN) == 1
    assert await show(codec(tmp_path)) == 1  # found by its plain digest
    async with opened(postgres_url, codec(tmp_path)) as database:
        await rotate(database)
        assert content_found_in(dump(postgres_url)) == []
    assert await show(codec(tmp_path)) == 1
    async with opened(postgres_url, codec(tmp_path)) as database:
        await rotate(database, decrypt=True)
    assert await show(PLAIN) == 1


async def count_files(connection: AsyncConnection) -> int:
    return int((await connection.exec_driver_sql("SELECT count(*) FROM files")).scalar_one())


# A worker whose file lacks a newer key leaves what it cannot read, says which key it lacks, and goes on with it.

LACKS = f"is encrypted with key [0-9a-f]{{10}}, which the file of {SETTING} lacks"


@pytest.fixture
async def behind(postgres_url: str, tmp_path: Path) -> AsyncIterator[Database]:
    """Of a worker that reads a copy of the file from before a key was added."""
    codec(tmp_path)
    shutil.copy(tmp_path / "keys", tmp_path / "copy")
    database = Database(postgres_url, TEST_LIMIT, ContentCodec(Sealer(tmp_path / "copy")))
    async with opened(postgres_url, codec(tmp_path)) as first:
        await first.compare_keys()
    await database.compare_keys()
    add_key(tmp_path / "keys")
    yield database
    await database.close()


@pytest.fixture
async def ahead(postgres_url: str, tmp_path: Path, behind: Database) -> AsyncIterator[PostgresLearning]:
    """Of processes that encrypt by the new key."""
    learning = await PostgresLearning.on(postgres_url, Database(postgres_url, TEST_LIMIT, codec(tmp_path)))
    yield learning
    await learning.database.close()


async def test_samples_stay_fresh_until_the_key_is_there(
    ahead: PostgresLearning, behind: Database, tmp_path: Path
) -> None:
    await ahead.set_recipe(recipe(batch_samples=2))
    samples = await ahead.add_samples(2)
    steps = PostgresStepStore(behind)
    with pytest.raises(EncryptionKeyMissing, match=LACKS) as raised:
        await steps.claim(POLICY, 1)
    assert isinstance(raised.value, TransientError)
    assert await states(ahead) == [SampleState.FRESH] * 2
    shutil.copy(tmp_path / "keys", tmp_path / "copy")
    await steps.claim(POLICY, 1)
    assert await states(ahead) == [SampleState.CLAIMED] * 2
    assert {sample.sample_id for sample in (await steps.batch(POLICY, 1)).samples} == set(samples)


async def test_a_claimed_batch_waits_for_the_key(ahead: PostgresLearning, behind: Database) -> None:
    await ahead.set_recipe(recipe(batch_samples=2))
    await ahead.add_samples(2)
    await ahead.steps.claim(POLICY, 1)
    with pytest.raises(EncryptionKeyMissing, match=LACKS):
        await PostgresStepStore(behind).batch(POLICY, 1)
    # Attempts that read nothing do not count as lost, which would pause training.
    training = TrainingActivities(PostgresStepStore(behind), FakeTrainer())
    for _ in range(LOST_ATTEMPTS + 1):
        with pytest.raises(EncryptionKeyMissing, match=LACKS):
            await training.train_step(TrainStep(policy=POLICY, n=1))
    assert await states(ahead) == [SampleState.CLAIMED] * 2


async def test_a_group_is_not_settled_without_the_key(
    ahead: PostgresLearning, behind: Database, tmp_path: Path
) -> None:
    groups, without = PostgresEpisodeStore(ahead.database), PostgresEpisodeStore(behind)
    group = new_group(2)
    await groups.make_group(group)
    for place in range(2):
        episode = await groups.begin_episode(group.id, place, 1, LIFETIME)
        await add_turns(ahead, episode, 1)
        await groups.end_episode(EpisodeEnd(episode.id, Ending.COMPLETED))
        await groups.score_episode(EpisodeScore(episode.id, float(place), ""))
    with pytest.raises(EncryptionKeyMissing, match=LACKS):
        await without.settle(group.id)
    shutil.copy(tmp_path / "keys", tmp_path / "copy")
    result, _ = await without.settle(group.id)
    assert (result.state, result.samples) == (GroupState.SETTLED, 2)


async def states(learning: PostgresLearning) -> list[object]:
    return [row["state"] for row in await learning.rows("SELECT state FROM samples WHERE policy = %s", POLICY)]
