"""Keys: of clients, of episodes, of encryption."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from api.auth import KeyRing
from clawloop.core.contracts.serving import ApiKey, Scope
from clawloop.core.encryption.key_file import SETTING, add_key, make_keys, read_keys
from clawloop.core.encryption.sealer import OVERHEAD, Sealer
from clawloop.core.episodes.keys import EpisodeKey, is_episode_key, sign, verify
from clawloop.core.errors import ContentUnreadable, EncryptionKeyMissing, RequestRejected, SetupError, StoreUnavailable
from clawloop.core.ids import ApiKeyId, new_episode_id
from db.content import MARK, PLAIN, ContentCodec
from tests.fakes.key_store import SIGNING_SECRET, FakeKeyStore

# The gateway's cache of API keys, on a fake store.


class SlowKeyStore(FakeKeyStore):
    """Answers once `released` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()

    async def authenticate(self, secret: str) -> ApiKey | None:
        self.lookups += 1
        await self.released.wait()
        self.lookups -= 1
        return await super().authenticate(secret)


def bearer(secret: str) -> Headers:
    return Headers({"authorization": f"Bearer {secret}"})


async def test_concurrent_first_requests_with_a_key_look_it_up_once() -> None:
    store = SlowKeyStore()
    ring, secret = KeyRing(store), store.add("default", {Scope.CHAT})
    waiting = [asyncio.create_task(ring.require(bearer(secret), Scope.CHAT)) for _ in range(30)]
    other = asyncio.create_task(ring.require(bearer(store.add("other", {Scope.CHAT})), Scope.CHAT))
    await asyncio.sleep(0)
    waiting.pop(0).cancel()  # a client that disconnected
    await asyncio.sleep(0)
    assert store.lookups == 2
    store.released.set()
    assert {key.policy for key in await asyncio.gather(*waiting)} == {"default"}
    assert (await other).policy == "other"
    assert store.lookups == 2


async def test_a_failed_look_up_is_shared_by_those_who_wait_and_not_cached() -> None:
    store = SlowKeyStore()
    store.released.set()
    ring, secret = KeyRing(store, retry_seconds=0), store.add("default", {Scope.CHAT})
    store.available = False
    failed = await asyncio.gather(*(ring.require(bearer(secret), Scope.CHAT) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in failed] == [StoreUnavailable] * 3
    store.available = True
    assert (await ring.require(bearer(secret), Scope.CHAT)).policy == "default"
    for _ in range(2):
        with pytest.raises(RequestRejected):
            await ring.require(bearer("cl-unknown"), Scope.CHAT)


async def test_the_first_request_with_a_key_waits_for_a_late_store() -> None:
    store = FakeKeyStore()
    ring, secret = KeyRing(store, retry_seconds=5), store.add("default", {Scope.CHAT})
    store.available = False
    request = asyncio.create_task(ring.require(bearer(secret), Scope.CHAT))
    await asyncio.sleep(0.05)
    store.available = True
    assert (await request).policy == "default"
    assert store.lookups == 2


HOUR = timedelta(hours=1)


async def test_an_episodes_key_never_seen_is_accepted_while_the_store_is_away() -> None:
    store = FakeKeyStore()
    ring = KeyRing(store, retry_seconds=0)
    _, first = store.add_episode("default", datetime.now(UTC) + HOUR)
    assert (await ring.require(bearer(first), Scope.CHAT)).episode is not None
    store.available = False
    unseen = EpisodeKey(new_episode_id(), "other", (datetime.now(UTC) + HOUR).replace(microsecond=0))
    key = await ring.require(bearer(sign(unseen, SIGNING_SECRET)), Scope.CHAT)
    assert key.id == ApiKeyId(unseen.episode)
    assert (key.policy, key.episode) == ("other", unseen.episode)
    with pytest.raises(StoreUnavailable):
        await ring.require(bearer(sign(unseen, b"another secret")), Scope.CHAT)
    with pytest.raises(RequestRejected, match="needs a key with the scope admin"):
        await ring.require(bearer(sign(unseen, SIGNING_SECRET)), Scope.ADMIN)


async def test_a_signing_secret_that_was_replaced_signs_no_key_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeKeyStore()
    ring = KeyRing(store, retry_seconds=0)
    await ring.require(bearer(store.add_episode("default", datetime.now(UTC) + HOUR)[1]), Scope.CHAT)
    store.signing = b"another secret"
    monkeypatch.setattr("api.auth.FRESH_SECONDS", 0.0)  # half a minute later
    await ring.require(bearer(store.add_episode("default", datetime.now(UTC) + HOUR)[1]), Scope.CHAT)
    store.available = False
    unseen = EpisodeKey(new_episode_id(), "default", datetime.now(UTC) + HOUR)
    with pytest.raises(StoreUnavailable):
        await ring.require(bearer(sign(unseen, SIGNING_SECRET)), Scope.CHAT)
    assert (await ring.require(bearer(sign(unseen, store.signing)), Scope.CHAT)).episode == unseen.episode


async def test_a_gateway_reads_the_signing_secret_again_though_no_episode_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeKeyStore()
    monkeypatch.setattr("api.auth.FRESH_SECONDS", 0.01)
    async with KeyRing(store, retry_seconds=0) as ring:
        await ring.require(bearer(store.add_episode("default", datetime.now(UTC) + HOUR)[1]), Scope.CHAT)
        store.available = False
        await asyncio.sleep(0.05)  # an outage ends nothing
        store.available = True
        read = store.signing_secret
        monkeypatch.setattr(store, "signing_secret", bug := Mock(side_effect=RuntimeError("a bug")))
        async with asyncio.timeout(30):
            while not bug.called:
                await asyncio.sleep(0.01)
        monkeypatch.setattr(store, "signing_secret", read)
        store.signing = b"another secret"
        async with asyncio.timeout(30):
            while ring._signing_secret != store.signing:
                await asyncio.sleep(0.01)
        store.available = False
        unseen = EpisodeKey(new_episode_id(), "default", datetime.now(UTC) + HOUR)
        with pytest.raises(StoreUnavailable):
            await ring.require(bearer(sign(unseen, SIGNING_SECRET)), Scope.CHAT)


async def test_a_gateway_reads_the_signing_secret_before_any_episode_asks() -> None:
    store = FakeKeyStore()
    async with KeyRing(store, retry_seconds=0) as ring:
        async with asyncio.timeout(30):
            while ring._signing_secret is None:
                await asyncio.sleep(0.01)
        store.available = False
        unseen = EpisodeKey(new_episode_id(), "default", datetime.now(UTC) + HOUR)
        assert (await ring.require(bearer(sign(unseen, SIGNING_SECRET)), Scope.CHAT)).episode == unseen.episode


async def test_a_gateway_that_never_read_the_signing_secret_cannot_check_a_key() -> None:
    store = FakeKeyStore()
    _, secret = store.add_episode("default", datetime.now(UTC) + HOUR)
    store.available = False
    with pytest.raises(StoreUnavailable):
        await KeyRing(store, retry_seconds=0).require(bearer(secret), Scope.CHAT)


async def test_no_cache_outlives_an_expired_key(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeKeyStore()
    ring = KeyRing(store, retry_seconds=0)
    _, secret = store.add_episode("default", datetime.now(UTC) + timedelta(seconds=60))
    await ring.require(bearer(secret), Scope.CHAT)
    store.available = False
    later = datetime.now(UTC) + timedelta(seconds=61)

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return later

    monkeypatch.setattr("api.auth.datetime", Later)
    with pytest.raises(RequestRejected, match="belonged to an episode that has ended"):
        await ring.require(bearer(secret), Scope.CHAT)
    with pytest.raises(StoreUnavailable):  # by now it is not cached, and its signature is of no use
        await ring.require(bearer(secret), Scope.CHAT)


async def test_the_end_of_an_episode_is_seen_when_its_key_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeKeyStore()
    ring = KeyRing(store, retry_seconds=0)
    _, secret = store.add_episode("default", datetime.now(UTC) + HOUR)
    await ring.require(bearer(secret), Scope.CHAT)
    store.end_episode(secret)
    await ring.require(bearer(secret), Scope.CHAT)  # cached for FRESH_SECONDS
    monkeypatch.setattr("api.auth.FRESH_SECONDS", 0.0)
    with pytest.raises(RequestRejected):
        await ring.require(bearer(secret), Scope.CHAT)


# The file of encryption keys: what it may hold, who may read it, and values bound to their places.


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ContentCodec:
    path = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(path)
    return ContentCodec(Sealer(path))


def test_a_new_file_is_its_owners_alone_and_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    make_keys(path)
    before = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(SetupError, match="exists already"):
        make_keys(path)
    assert path.read_text() == before


def test_a_new_key_comes_first_and_the_digests_stay(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    make_keys(path)
    before = read_keys(path)
    assert add_key(path) == 2
    after = read_keys(path)
    assert (after.digests, after.keys[1:]) == (before.digests, before.keys)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [other.name for other in tmp_path.iterdir()] == ["keys"]


def test_keys_that_are_added_at_once_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    make_keys(path)
    with ThreadPoolExecutor(8) as threads:
        counts = list(threads.map(add_key, [path] * 8))
    assert sorted(counts) == list(range(2, 10))
    assert len(set(read_keys(path).keys)) == 9


def test_whoever_could_read_the_file_can_after_a_new_key(tmp_path: Path) -> None:
    path, link = tmp_path / "keys", tmp_path / "link"
    make_keys(path)
    link.symlink_to(path)
    path.chmod(0o640)
    if os.getuid() == 0:
        os.chown(path, 10_001, 10_001)
    before = path.stat()
    add_key(link)
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert link.is_symlink()


def test_a_process_with_an_older_file_reads_the_new_key_once_the_file_is_whole(tmp_path: Path) -> None:
    new, old = tmp_path / "keys", tmp_path / "old"
    make_keys(new)
    old.touch(0o600)
    old.write_bytes(new.read_bytes())
    running = Sealer(old)
    before = running.seal(b"before", "here")
    add_key(new)
    sealed = Sealer(new).seal(b"after", "here")
    old.write_bytes(new.read_bytes()[:60])  # half of it is copied
    (number,) = {line.partition("# ")[2] for line in new.read_text().splitlines()[:3] if line.startswith("key")}
    with pytest.raises(EncryptionKeyMissing, match=f"here is encrypted with key {number}, which the file of {SETTING}"):
        running.open(sealed, "here")
    assert running.open(before, "here") == b"before"
    old.write_bytes(new.read_bytes())
    assert running.open(sealed, "here") == b"after"
    for damaged in (b"", sealed[:20], b"\0" * 40, sealed[:-1]):
        with pytest.raises(ContentUnreadable):
            running.open(damaged, "here")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "0 keys and 0 lines `digests`"),
        ("key AAAA\n", "line 1 of .* has no key of 32 bytes"),
        ("key !\n", "line 1 of .* has no key of 32 bytes"),
        ("# x\nsecret AAAA\n", "line 2 of .* is neither `key …` nor `digests …`"),
        (f"key {'A' * 43}=\n", "1 keys and 0 lines `digests`"),
    ],
)
def test_a_wrong_file_names_the_setting_and_the_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SetupError, match=f"{SETTING}: .*{problem}|{SETTING}: {problem}"):
        read_keys(path)


def test_a_file_that_is_missing_or_that_everybody_reads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(SetupError, match=f"{SETTING}: cannot read .*`clawloop encryption key` makes one"):
        Sealer(path)
    make_keys(path)
    path.chmod(0o644)
    with pytest.raises(SetupError, match="chmod 600"):
        Sealer(path)


@given(text=st.text(st.characters(codec="utf-8")), content=st.binary().map(lambda raw: raw[: len(raw) // 4 * 4]))
def test_values_read_back_in_their_place_and_in_no_other(codec: ContentCodec, text: str, content: bytes) -> None:
    for value in (text, f"{MARK}{text}", f"{MARK}:{text}"):
        for each in (codec, PLAIN):
            stored = each.write_text(value, "votes.raw", 1)
            assert codec.read_text(stored, "votes.raw", 1) == value
    sealed = codec.write_bytes(content, "turns.prompt_ids", 1)
    assert codec.read_bytes(sealed, "turns.prompt_ids", 1) == content
    assert codec.read_bytes(content, "turns.prompt_ids", 1) == content  # plain, from before
    if content:
        assert len(sealed) == len(content) + OVERHEAD
        for column, row in (("turns.prompt_ids", 2), ("turns.response_ids", 1)):
            with pytest.raises(ContentUnreadable):
                codec.read_bytes(sealed, column, row)
        with pytest.raises(EncryptionKeyMissing, match=SETTING):
            PLAIN.read_bytes(sealed, "turns.prompt_ids", 1)


def test_json_keeps_its_text_and_says_nothing_of_equal_values(codec: ContentCodec) -> None:
    text = '{"b":1.0,"a":[1,"\\u0000"]}'
    one, other = (codec.write_json(text, "turns.response", 1) for _ in range(2))
    assert one != other
    assert codec.json_text(one, "turns.response", 1) == text
    assert [codec.write_json(empty, "turns.response", 1) for empty in ("[]", "{}")] == ["[]", "{}"]


def test_digests_are_keyed_once_and_found_in_both_forms(codec: ContentCodec) -> None:
    keyed = codec.write_digest(b"0" * 16)
    assert codec.write_digest(keyed) == keyed != b"0" * 16
    assert codec.find_digests([b"0" * 16]) == {keyed: b"0" * 16, b"0" * 16: b"0" * 16}
    assert PLAIN.find_digests([b"0" * 16]) == {b"0" * 16: b"0" * 16}


# Keys of episodes: genuine, forged, malformed.

SECRET = b"s" * 32
KEY = EpisodeKey(new_episode_id(), "agent-7.ü", datetime(2027, 1, 2, 3, 4, 5, tzinfo=UTC))


def test_a_key_says_what_was_signed() -> None:
    token = sign(KEY, SECRET)
    assert is_episode_key(token)
    assert verify(token, SECRET) == KEY


def test_a_key_of_another_secret_is_refused() -> None:
    assert verify(sign(KEY, b"t" * 32), SECRET) is None


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, policy="other"),
        replace(KEY, expires_at=KEY.expires_at + timedelta(days=1)),
        replace(KEY, episode=new_episode_id()),
    ],
)
def test_no_part_of_a_key_can_be_replaced(other: EpisodeKey) -> None:
    said, _, _ = sign(other, SECRET).partition(".")
    _, _, mac = sign(KEY, SECRET).partition(".")
    assert verify(f"{said}.{mac}", SECRET) is None


@pytest.mark.parametrize(
    "token",
    ["", "ce_", "cl-01234567-x", sign(KEY, SECRET)[:-1], sign(KEY, SECRET) + "x"],
    ids=["nothing", "prefix", "another kind", "cut", "longer"],
)
def test_what_is_no_key_is_none(token: str) -> None:
    assert not is_episode_key(token)
    assert verify(token, SECRET) is None
