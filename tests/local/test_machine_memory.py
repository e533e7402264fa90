"""The memory that a process may use: of the machine, or of its control groups, of either version."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from clawloop.app.local.machine import memory_bytes

UNLIMITED = "9223372036854771712"


def machine(root: Path, groups: str, **limits: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for path, value in limits.items():
        file = root / "sys/fs/cgroup" / path.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "1000"}, 1000),
        ("0::/\n", {"memory.max": "max"}, None),
        # On the machine itself: the group's own limit, and those above it.
        ("0::/a/b\n", {"a__b__memory.max": "max", "a__memory.max": "2000"}, 2000),
        ("4:memory:/docker/x\n0::/\n", {"memory__memory.limit_in_bytes": "3000"}, 3000),
        (
            "9:pids:/y\n4:memory,hugetlb:/x\n",
            {"memory__memory.limit_in_bytes": UNLIMITED, "memory__x__memory.limit_in_bytes": "4000"},
            4000,
        ),
        ("4:memory:/\n", {"memory__memory.limit_in_bytes": UNLIMITED}, None),
        ("", {}, None),
    ],
)
def test_a_limit_of_either_version_counts(
    groups: str, limits: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    total = psutil.virtual_memory().total
    assert memory_bytes(machine(tmp_path, groups, **limits)) == (total if expected is None else expected)


def test_without_control_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == psutil.virtual_memory().total
