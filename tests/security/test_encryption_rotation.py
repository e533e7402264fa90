"""Content is encrypted beside plain content, by one key after another, and decrypted again."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from api.recording.spool import Spool
from clawloop.app.processes.operations import DatabaseCheck
from clawloop.core.contracts.turns import Message
from clawloop.core.contracts.views import SessionFilter
from clawloop.core.encryption.key_file import SETTING, add_key
from clawloop.core.encryption.sealer import Sealer
from clawloop.core.errors import StoreUnavailable
from clawloop.core.ids import SessionId, new_turn_id
from clawloop.environments.artifacts import ArtifactFolder
from db.content import PLAIN, ContentCodec
from db.database import Database
from db.encryption import rotation
from db.encryption import rotation as rotation_module
from db.encryption.columns import SEALED_TABLES, Form
from db.encryption.rotation import rotate
from db.erasure import PostgresErasureStore
from db.turns.files import PostgresFileStore
from db.turns.insert import PostgresTurnStore
from db.turns.read import ConversationCache
from db.turns.sessions import PostgresSessionStore
from tests.pictures import asks_about
from tests.records import turn_record
from tests.security.encrypted import (
    ANSWER,
    FAULT,
    NAMED,
    PICTURE,
    SAY,
    TOOLS,
    Loop,
    codec,
    content_found_in,
    dump,
    opened,
    require_clean,
    require_readable,
    whole_loop,
)


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
