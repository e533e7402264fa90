"""The file of encryption keys: what it may hold, who may read it, and values bound to their places."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.encryption.key_file import SETTING, add_key, make_keys, read_keys
from clawloop.core.encryption.sealer import OVERHEAD, Sealer
from clawloop.core.errors import ContentUnreadable, EncryptionKeyMissing, SetupError
from db.content import MARK, PLAIN, ContentCodec


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
