"""How long the path of the folder for temporary files may be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clawloop.core.errors import SetupError
from clawloop.core.ids import new_episode_id
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders
from clawloop.sandboxes.relay import relaying
from tests.sandboxes.test_bubblewrap import open_folder

__all__ = ["open_folder"]
_LONGEST = 31


async def test_the_longest_path_that_is_taken_has_room_for_an_episodes_socket(open_folder: Path) -> None:
    longest = open_folder / ("x" * (_LONGEST - 1 - len(os.fsencode(open_folder))))
    longest.mkdir()
    folders = BoxFolders(longest)
    folders.check_path()
    with folders.new(str(new_episode_id())) as box:
        async with relaying(box.gateway, "127.0.0.1", 1):
            assert len(os.fsencode(box.gateway)) == 107


def test_a_longer_path_is_refused_at_start_in_one_line(open_folder: Path) -> None:
    longer = open_folder / ("x" * (_LONGEST - len(os.fsencode(open_folder))))
    longer.mkdir()
    with pytest.raises(SetupError) as raised:
        Bubblewrap.find(BoxFolders(longer))
    assert str(raised.value) == (
        "sandboxes have sockets in the folder for temporary files, whose path may have 31 characters, and"
        f" {longer} has 32: set TMPDIR to a shorter one"
    )
    assert list(longer.iterdir()) == []
