"""Every secret is replaced as docs/security.md says, while chats go on through the gateways of `clawloop up`.

No chat fails, and afterwards the old secret is of no use.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import httpx
import psycopg
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from clawloop.app.processes.database import codec_of
from clawloop.app.processes.endpoints import read_runtime_file
from clawloop.core.encryption.key_file import SETTING, make_keys
from clawloop.core.encryption.sealer import LOOK_SECONDS, Sealer
from clawloop.core.episodes.keys import verify
from clawloop.core.errors import EncryptionKeyMissing
from clawloop.serving.engine_guard import EngineGuard
from db.database import BACKGROUND_LIMIT, Database
from db.episodes.groups import PostgresEpisodeStore
from db.serving.keys import PostgresKeyStore
from tests.api.chat_requests import TEXT
from tests.contract.episodes import new_group
from tests.e2e.up import Up, up
from tests.fakes.engine import FakeEngine, serving
from tests.verbs import clawloop_process

# Gateways ask for a key's state every 30 s.
REVOKED_WITHIN = 120.0


@dataclass
class Installation:
    """
    Attributes:
        key: the chat key that the clients use now.
        answers: the status of each chat, and what stood in the way of one.
    """

    up: Up
    gateway: str
    engine: str
    keys_file: Path
    engine_secrets: Path
    key: str
    admin: str
    answers: list[int | str] = field(default_factory=list)

    async def verb(self, *words: str) -> str:
        settings = {
            SETTING: str(self.keys_file),
            "CLAWLOOP_DATA": str(self.up.data),
            "CLAWLOOP_ENGINE_SECRET_FILE": str(self.engine_secrets),
        }
        done = await asyncio.to_thread(clawloop_process, *words, **settings)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    async def more_chats(self, count: int = 8) -> None:
        """Until so many more have ended, all of them well."""
        wanted = len(self.answers) + count
        async with asyncio.timeout(120):
            while len(self.answers) < wanted:
                await asyncio.sleep(0.02)
        assert set(self.answers) == {200}

    async def status(self, path: str, secret: str) -> int:
        async with httpx.AsyncClient(base_url=self.gateway, timeout=60) as client:
            return (await client.get(path, headers={"Authorization": f"Bearer {secret}"})).status_code


async def keep_chatting(installation: Installation, number: int) -> None:
    """Conversations of four turns, which gateways have to recognise, streamed; on a connection each."""
    for conversation in itertools.count():
        messages: list[dict[str, str]] = []
        for turn in range(4):
            messages.append({"role": "user", "content": f"Client {number}, tale {conversation}, part {turn}"})
            headers = {"Authorization": f"Bearer {installation.key}"}
            body = {"model": "policy", "messages": messages, "stream": True}
            try:
                async with httpx.AsyncClient(base_url=installation.gateway, headers=headers, timeout=120) as client:
                    answer = await client.post("/v1/chat/completions", json=body)
                whole = answer.status_code != 200 or "data: [DONE]" in answer.text
                installation.answers.append(answer.status_code if whole else answer.text)
            except httpx.HTTPError as error:
                installation.answers.append(repr(error))
            messages.append({"role": "assistant", "content": TEXT})
            await asyncio.sleep(0.05)


@pytest.fixture
async def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Installation]:
    keys_file, secrets = tmp_path / "keys", tmp_path / "engine-secrets"
    make_keys(keys_file)
    secrets.write_text("the-first-secret\n")
    secrets.chmod(0o600)
    monkeypatch.setenv("CLAWLOOP_ENGINE_SECRET_FILE", str(secrets))
    async with guarded_engine() as engine:
        settings = {"CLAWLOOP_ENGINES": engine, SETTING: str(keys_file), "CLAWLOOP_ENGINE_SECRET_FILE": str(secrets)}
        with up(tmp_path / "data", tmp_path / "up.log", settings=settings) as running:

            async def line(pattern: str) -> str:
                return await asyncio.to_thread(running.line, pattern)

            gateway = await line(r"gateway +(http://[^ ]+)/v1$")
            chat_key, admin = await line(r"chat key +(\S+)$"), await line(r"admin key +(\S+)$")
            found = Installation(running, gateway, engine, keys_file, secrets, chat_key, admin)
            chats = [asyncio.create_task(keep_chatting(found, number)) for number in range(4)]
            try:
                await found.more_chats()
                yield found
            finally:
                for task in chats:
                    task.cancel()
                await asyncio.gather(*chats, return_exceptions=True)


@asynccontextmanager
async def guarded_engine() -> AsyncIterator[str]:
    """A stand-in engine behind the real guard, in this process."""
    fake = FakeEngine()
    routes = [
        Route("/v1/models", fake.list_models),
        Route("/v1/chat/completions", fake.chat, methods=["POST"]),
        Route("/tokenize", fake.tokenize, methods=["POST"]),
        Route("/health", fake.health),
    ]
    async with serving(EngineGuard(Starlette(routes=routes))) as url:
        yield url


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_every_secret_is_replaced_without_a_failed_chat(installation: Installation) -> None:
    await secret_of_episodes(installation)
    await secret_of_engines(installation)
    await key_of_contents(installation)
    await api_keys(installation)
    await installation.more_chats()


async def api_keys(installation: Installation) -> None:
    old, old_admin = installation.key, installation.admin
    installation.key = await installation.verb("key", "create", "--scope", "chat", "--name", "phone-2")
    installation.admin = await installation.verb("key", "create", "--scope", "admin", "--name", "office-2")
    await installation.more_chats()  # those under way with the old one have ended
    for secret in (old, old_admin):
        await installation.verb("key", "revoke", secret[: len("cl-01234567")])
    for path, secret in (("/v1/models", old), ("/admin/v1/keys", old_admin)):
        await until_refused(installation, path, secret)
    assert await installation.status("/admin/v1/keys", installation.admin) == 200
    await installation.more_chats()


async def until_refused(installation: Installation, path: str, secret: str) -> None:
    """Several times in a row, since each of the gateways asks for itself."""
    refused = 0
    async with asyncio.timeout(REVOKED_WITHIN):
        while refused < 10:
            refused = refused + 1 if await installation.status(path, secret) == 401 else 0
            await asyncio.sleep(0.1)


async def secret_of_engines(installation: Installation) -> None:
    async def status(secret: str) -> int:
        async with httpx.AsyncClient(base_url=installation.engine) as client:
            return (await client.get("/v1/models", headers={"Authorization": f"Bearer {secret}"})).status_code

    await installation.verb("engine", "renew-secret")
    new, old = installation.engine_secrets.read_text().split()
    assert (await status(old), await status(new)) == (200, 200)
    await installation.more_chats()
    await installation.verb("engine", "renew-secret", "--finish")
    assert (await status(old), await status(new)) == (401, 200)
    await installation.more_chats()


async def key_of_contents(installation: Installation) -> None:
    before = installation.keys_file.with_name("keys-of-before")
    shutil.copy(installation.keys_file, before)
    await installation.verb("encryption", "key", str(installation.keys_file), "--add")
    await asyncio.sleep(2 * LOOK_SECONDS)
    await installation.more_chats()
    while not (await installation.verb("encryption", "rotate")).startswith("0 rows and 0 files"):
        pass
    lines = installation.keys_file.read_text().splitlines()
    _, second = [line for line in lines if line.startswith("key ")]
    kept = installation.keys_file.with_name("kept")
    kept.write_text("\n".join(line for line in lines if line != second) + "\n")
    kept.chmod(0o600)
    kept.replace(installation.keys_file)
    await asyncio.sleep(2 * LOOK_SECONDS)
    await installation.more_chats(24)  # conversations from before are recognised, and go on
    await installation.verb("check")
    addresses = read_runtime_file(installation.up.data)
    assert addresses is not None
    async with await psycopg.AsyncConnection.connect(addresses.database_url) as connection:
        query = "SELECT id, response_ids FROM turns WHERE response_ids IS NOT NULL"
        stored = await (await connection.execute(query)).fetchall()
    assert len(stored) > 40
    useless = Sealer(before)
    for turn, sealed in stored:
        with pytest.raises(EncryptionKeyMissing):
            useless.open(bytes(sealed), f"turns.response_ids {turn}")


async def secret_of_episodes(installation: Installation) -> None:
    addresses = read_runtime_file(installation.up.data)
    assert addresses is not None
    database = Database(addresses.database_url, BACKGROUND_LIMIT, codec_of(installation.keys_file))
    try:
        store, keys = PostgresEpisodeStore(database), PostgresKeyStore(database)
        group = new_group(2)
        await store.make_group(group)
        running = await store.begin_episode(group.id, 0, 1, timedelta(hours=1))
        handed_out, old = await store.key_of(running.id), await keys.signing_secret()
        assert await installation.status("/v1/models", handed_out) == 200
        await installation.verb("key", "renew-signing")
        later = await store.begin_episode(group.id, 1, 1, timedelta(hours=1))
        new = await store.key_of(later.id)
        assert verify(new, old) is None
        assert await installation.status("/v1/models", new) == 200
        assert await installation.status("/v1/models", handed_out) == 200  # ends with its episode
    finally:
        await database.close()
