"""The files in a data folder by which other commands find the last `clawloop up`."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any
from uuid import UUID

import pytest

from clawloop.app.processes.endpoints import RuntimeAddresses, installation_id, read_runtime_file, write_runtime_file
from clawloop.core.errors import SetupError


def test_addresses_are_read_back_and_only_the_owner_can_read_the_file(tmp_path: Path) -> None:
    assert read_runtime_file(tmp_path) is None
    own = RuntimeAddresses("postgresql://me:secret@here/x", "here:7233", None, "http://here:4000", None)
    write_runtime_file(tmp_path, own)
    assert read_runtime_file(tmp_path) == own
    whole = RuntimeAddresses("postgresql://here/x", "here:7233", "http://ui", "http://here:4000", 4096)
    write_runtime_file(tmp_path, whole)
    assert read_runtime_file(tmp_path) == whole
    assert stat.S_IMODE((tmp_path / "running.json").stat().st_mode) == 0o600


_WITHOUT_GATEWAY = b'{"database_url": "secr", "temporal_address": "x", "temporal_ui": null, "context_tokens": null}'


@pytest.mark.parametrize(
    "content", [b"", b'{"database_url": "secr', b"[]", b"7", b'{"secret": 1}', _WITHOUT_GATEWAY, b"\xff"]
)
def test_a_damaged_file_is_reported_in_one_line_without_its_content(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "running.json"
    path.write_bytes(content)
    with pytest.raises(SetupError, match=f"{path} is damaged") as raised:
        read_runtime_file(tmp_path)
    assert "\n" not in str(raised.value)
    assert "secr" not in str(raised.value)


def test_a_data_folder_keeps_its_installation_id(tmp_path: Path) -> None:
    first = installation_id(tmp_path / "one")
    assert installation_id(tmp_path / "one") == first
    assert installation_id(tmp_path / "two") != first


def test_an_installation_id_that_could_not_be_written_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "installation").touch()
    made = installation_id(tmp_path)
    assert str(UUID(made)) == made
    opened = Path.open

    def open_to_read(path: Path, mode: str = "r", **options: Any) -> IO[Any]:
        if "a" in mode:
            raise PermissionError(13, "Permission denied")
        return opened(path, mode, **options)

    monkeypatch.setattr(Path, "open", open_to_read)
    assert installation_id(tmp_path) == made  # which needs no right to write


def test_gateways_that_begin_together_have_one_installation_id(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(installation_id, [tmp_path] * 64))) == 1
