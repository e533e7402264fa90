"""What can be done on the page can be done by a command and over REST: the documented list has all of the code.

What is in one of them alone is listed with its reason.
"""

from __future__ import annotations

import re

from tests.rules.tables import COMMANDS, ROOT, routes

TEXT = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
SECTION = TEXT.split("\n### In three places\n")[1].split("\n### ")[0]
SHARED, ALONE = (
    [
        line.strip("| ").split(" | ")
        for line in part.splitlines()
        if line.startswith("| ") and not line.startswith("| what |")
    ]
    for part in SECTION.split("\nWhat there is in one of them alone:\n")
)


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_each_thing_is_in_all_three_places() -> None:
    assert len(SHARED) > 40
    for what, page, command, rest in SHARED:
        assert named(page), what
        assert all(" /ui" in route for route in named(page)), what
        assert named(command), what
        assert all(verb.startswith("clawloop ") for verb in named(command)), what
        assert named(rest), what
        assert all(" /admin/v1/" in route or " /v1/" in route for route in named(rest)), what


def test_what_is_in_one_place_alone_has_a_reason_and_is_in_no_other() -> None:
    shared = {name for row in SHARED for cell in row[1:] for name in named(cell)}
    for names, reason in ALONE:
        assert not shared & set(named(names))
        assert len(reason.split()) > 4, names


def test_the_list_has_every_route_and_command_and_no_other() -> None:
    listed = {name for row in SHARED for cell in row[1:] for name in named(cell)}
    listed |= {name for names, _ in ALONE for name in named(names)}
    there = routes() | {f"clawloop {command}".strip() for command in COMMANDS}
    assert there - listed == set()
    assert listed - there == set()
