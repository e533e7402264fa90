"""The environment worker of `clawloop up`: started where sandboxes can be made, else left out in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawloop.app.local import parts, up
from clawloop.app.local.parts import Deployment
from clawloop.app.local.plan import UpOptions
from clawloop.app.local.supervision.supervisor import PartStatus
from clawloop.core.errors import SetupError
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders


class Lines:
    """Satisfies `Board`."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def changed(self, status: PartStatus) -> None:
        raise AssertionError(status)


def deployment(tmp_path: Path, sandboxed: str | None) -> Deployment:
    return Deployment(
        data=tmp_path,
        database_url="postgresql://x/y",
        temporal_address="127.0.0.1:7233",
        engines=(),
        base_model="tiny",
        aliases=(),
        keys={},
        sandboxed=sandboxed,
    )


def test_its_sandboxes_reach_the_gateways_of_this_up(tmp_path: Path) -> None:
    started = parts.workers(deployment(tmp_path, "http://127.0.0.1:31234"), {})
    [worker] = [part for part in started if part.name == "environment"]
    command = worker.prepare().command
    assert command[command.index("--gateway") + 1] == "http://127.0.0.1:31234"
    assert not any(part.name == "environment" for part in parts.workers(deployment(tmp_path, None), {}))


async def test_a_machine_without_sandboxes_has_none_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(folders: BoxFolders) -> Bubblewrap:
        raise SetupError("no bubblewrap: install it")

    options, board = UpOptions(data=tmp_path, environment={}), Lines()
    monkeypatch.setattr(Bubblewrap, "find", find)
    assert await up.makes_sandboxes(options, board) is False
    assert board.said == ["no environment worker, so no rollouts on this machine: no bubblewrap: install it"]


async def test_this_machine_makes_sandboxes(tmp_path: Path) -> None:
    board = Lines()
    assert await up.makes_sandboxes(UpOptions(data=tmp_path, environment={}), board) is True
    assert board.said == []
