"""Unneeded adapters are deleted; those an engine has or a step may start from stay."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from activities.serving.retention import Retention
from clawloop.core.adapters.directory import AdapterFolder
from clawloop.core.contracts.training import VersionRef
from clawloop.core.errors import AdapterUnusable
from clawloop.core.recipes.recipe import Recipe, Train
from db.serving.directory import ensure_policy
from db.serving.publishing import PostgresPublishingStore
from db.training.operators import PostgresTrainingStore
from tests.conftest import execute
from tests.engines.conftest import Shelf

HOURS = 2 * 3600.0


def on_disk(adapters: Path, *numbers: int) -> None:
    for n in numbers:
        folder = adapters / "default" / f"v{n}-0123456789ab"
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")


def left(adapters: Path) -> list[str]:
    return sorted(path.name.split("-")[0] for path in (adapters / "default").iterdir())


async def test_old_versions_that_no_engine_has_are_removed_once(shelf: Shelf, tmp_path: Path) -> None:
    on_disk(tmp_path, 1, 2, 3, 4, 5, 6)
    for n in range(1, 7):
        await shelf.publish(n)
    retention = Retention(shelf.store, AdapterFolder(tmp_path))
    assert await retention.remove() == 0
    shelf.age(HOURS)
    assert await retention.remove() == 0  # the engine has them all
    await shelf.unload()
    assert await retention.remove() == 3
    assert left(tmp_path) == ["v4", "v5", "v6"]  # the newest on the path stay for a roll-back
    assert await retention.remove() == 0


class FillingFolder(AdapterFolder):
    """On a disk that has a GiB left."""

    async def free_bytes(self) -> int:
        return 2**30


@pytest.mark.parametrize(("wanted", "removed"), [(2**30, 0), (2**30 + 1, 3)])
async def test_on_a_disk_that_fills_versions_are_removed_after_minutes(
    wanted: int, removed: int, shelf: Shelf, tmp_path: Path
) -> None:
    on_disk(tmp_path, 1, 2, 3, 4, 5, 6)
    for n in range(1, 7):
        await shelf.publish(n)
    retention = Retention(shelf.store, FillingFolder(tmp_path), wanted_free=wanted)
    assert await retention.remove() == 0
    shelf.age(6 * 60.0)
    assert await retention.remove() == 0  # the engine has them all
    await shelf.unload()
    assert await retention.remove() == removed


class RolledBackMeanwhile(PostgresPublishingStore):
    """An operator rolls back to a version after it was found removable and before it is removed."""

    async def removable(self, age: timedelta) -> list[VersionRef]:
        found = await super().removable(age)
        await PostgresTrainingStore(self._database).roll_back("default", 2)
        return found


async def test_a_version_rolled_back_to_meanwhile_keeps_its_files(shelf: Shelf, tmp_path: Path) -> None:
    on_disk(tmp_path, 1, 2, 3, 4, 5, 6)
    for n in range(1, 7):
        await shelf.publish(n)
    shelf.age(HOURS)
    await shelf.unload()
    retention = Retention(RolledBackMeanwhile(shelf.database), AdapterFolder(tmp_path))
    assert await retention.remove() == 1
    assert left(tmp_path) == ["v1", "v2", "v4", "v5", "v6"]
    assert shelf.one("SELECT array_agg(n) FROM versions WHERE removed_at IS NOT NULL") == [3]


class CrashingFolder(AdapterFolder):
    """The machine goes down before anything is deleted."""

    async def remove(self, path: str) -> bool:
        raise ConnectionAbortedError(path)


@pytest.mark.parametrize("begun", [False, True], ids=["marked", "half deleted"])
async def test_a_crash_after_the_mark_leaves_what_the_next_sweep_deletes(
    begun: bool, shelf: Shelf, tmp_path: Path
) -> None:
    on_disk(tmp_path, 1, 2, 3, 4)
    execute(shelf.url, "INSERT INTO recipes VALUES ('r', 'r', 's', 't', '{}')")
    for n in range(1, 5):
        await shelf.publish(n)
        execute(
            shelf.url,
            "INSERT INTO steps (policy, n, parent, epoch, state, recipe_hash, finished_at) "
            f"VALUES ('default', {n}, {n - 1}, 0, 'committed', 'r', now())",
        )
    shelf.age(HOURS)
    await shelf.unload()
    with pytest.raises(ConnectionAbortedError):
        await Retention(shelf.store, CrashingFolder(tmp_path)).remove()
    assert shelf.one("SELECT array_agg(n) FROM versions WHERE removed_at IS NOT NULL") == [1]
    assert left(tmp_path) == ["v1", "v2", "v3", "v4"]
    if begun:
        folder = tmp_path / "default"
        (folder / "v1-0123456789ab").rename(folder / ".removing-v1-0123456789ab")
    assert await Retention(shelf.store, AdapterFolder(tmp_path)).remove() == 1
    assert left(tmp_path) == ["v2", "v3", "v4"]


async def test_without_the_adapters_folder_no_version_is_marked_removed(shelf: Shelf, tmp_path: Path) -> None:
    for n in range(1, 6):
        await shelf.publish(n)
    shelf.age(HOURS)
    await shelf.unload()
    assert await Retention(shelf.store, AdapterFolder(tmp_path / "elsewhere")).remove() == 0
    assert shelf.one("SELECT count(*) FROM versions WHERE removed_at IS NOT NULL") == 0


@pytest.mark.parametrize("path", ["../outside/v1-0", "default", ".", "/etc"])
async def test_only_a_versions_directory_is_ever_deleted(path: str, tmp_path: Path) -> None:
    on_disk(tmp_path / "adapters", 1)
    (tmp_path / "outside" / "v1-0").mkdir(parents=True)
    with pytest.raises(AdapterUnusable, match="not a version"):
        await AdapterFolder(tmp_path / "adapters").remove(path)
    assert (tmp_path / "outside" / "v1-0").is_dir()
    assert left(tmp_path / "adapters") == ["v1"]


async def test_an_interrupted_removal_is_finished(tmp_path: Path) -> None:
    on_disk(tmp_path, 1)
    folder = tmp_path / "default"
    (folder / "v1-0123456789ab").rename(folder / ".removing-v1-0123456789ab")
    assert await AdapterFolder(tmp_path).remove("default/v1-0123456789ab")
    assert list(folder.iterdir()) == []


async def test_directories_of_failed_attempts_are_deleted_once_the_step_is_over(shelf: Shelf, tmp_path: Path) -> None:
    await shelf.publish(1)
    execute(shelf.url, "INSERT INTO recipes VALUES ('r', 'r', 's', 't', '{}')")
    for n, state, finished in ((1, "committed", "now()"), (2, "abandoned", "now()"), (3, "claimed", "NULL")):
        execute(
            shelf.url,
            "INSERT INTO steps (policy, n, parent, epoch, state, recipe_hash, finished_at) "
            f"VALUES ('default', {n}, {min(n - 1, 1)}, 0, '{state}', 'r', {finished})",
        )
    for name in ("v1-0123456789ab", "v1-ba9876543210", "v2-0123456789ab", "v3-0123456789ab", "v4-0123456789ab"):
        (tmp_path / "default" / name).mkdir(parents=True)
    for name in (".tmp-v2-0123456789ab", "v2-0123456789ab-mine"):
        (tmp_path / "default" / name).mkdir()
    retention = Retention(shelf.store, AdapterFolder(tmp_path))
    assert await retention.remove() == 2
    assert sorted(path.name for path in (tmp_path / "default").iterdir()) == [
        ".tmp-v2-0123456789ab",
        "v1-0123456789ab",
        "v2-0123456789ab-mine",
        "v3-0123456789ab",  # its trainer may commit it yet
        "v4-0123456789ab",  # no step of this ledger: another installation's
    ]
    assert await retention.remove() == 0


async def test_each_policy_keeps_as_many_versions_as_its_recipe_says(shelf: Shelf, tmp_path: Path) -> None:
    for policy, kept in (("anna", 1), ("ben", 4), ("cleo", None)):
        await ensure_policy(shelf.database, policy, "tiny", [])
        if kept is not None:
            recipe = Recipe(name="keeps", train=Train(kept_versions=kept))
            await PostgresTrainingStore(shelf.database).set_recipe(policy, recipe)
        shelf.commit(*range(1, 6), policy=policy)
        execute(shelf.url, f"UPDATE policies SET active = 5 WHERE id = '{policy}'")
        for n in range(1, 6):
            (tmp_path / policy / f"v{n}-0123456789ab").mkdir(parents=True)
    shelf.age(HOURS)
    assert await Retention(shelf.store, AdapterFolder(tmp_path)).remove() == 4 + 1 + 2
    for policy, first in (("anna", 5), ("ben", 2), ("cleo", 3)):
        left = {path.name.split("-")[0] for path in (tmp_path / policy).iterdir()}
        assert left == {f"v{n}" for n in range(first, 6)}, policy


async def test_files_that_another_policy_began_from_stay_until_it_needs_them_no_more(
    shelf: Shelf, tmp_path: Path
) -> None:
    on_disk(tmp_path, 1, 2, 3, 4)
    for n in range(1, 5):
        await shelf.publish(n)
    operators = PostgresTrainingStore(shelf.database)
    await operators.create_policy("anna", "default", None, 1)
    await shelf.load()
    assert "anna-v1" in shelf.rows()
    assert await shelf.store.activate("anna", 1, 0)
    shelf.age(HOURS)
    await shelf.unload()
    retention = Retention(shelf.store, AdapterFolder(tmp_path))
    assert await retention.remove() == 0  # version 1 of the policy `default` is marked, its files are anna's too
    assert shelf.one("SELECT array_agg(policy || n) FROM versions WHERE removed_at IS NOT NULL") == ["default1"]
    assert left(tmp_path) == ["v1", "v2", "v3", "v4"]
    await operators.roll_back("anna", 0)
    shelf.age(HOURS)
    await shelf.unload()
    assert await retention.remove() == 1
    assert left(tmp_path) == ["v2", "v3", "v4"]
