"""REST, `--json`, tables, pages and rows of a scripted ledger are as the files say.

`python -m tests.golden.record` writes the files anew; read their difference before you commit it.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import pytest

from tests.golden import script, surfaces
from tests.ui.conftest import Page, page

__all__ = ["page"]

FILES = Path(__file__).parent / "files"
RECORD = "CLAWLOOP_RECORD_GOLDEN"
"""Set by `tests.golden.record`."""
# Of this process and moment, not of the ledger.
MEASURED = re.compile(r'"(seconds|created|seconds_left|checked_at)": [0-9.]+')
NUMBERS = re.compile(r"\[[-0-9.,e\s]+\]")


@pytest.fixture(autouse=True)  # before the page, whose keys have ids as well
async def _fixed_ids() -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        script.fixed_ids(stack)
        yield


async def test_what_people_and_programs_see_of_a_ledger_is_as_recorded(page: Page, tmp_path: Path) -> None:
    (engine,) = await page.learning.rows("SELECT id FROM engines")
    written = await script.write(page.learning, engine["id"])
    script.fix_times(page.database_url, written.chapters)
    names = written.made
    rows = await surfaces.ledger(page.learning)
    rest = await surfaces.rest(page, names)
    as_json, tables = await surfaces.commands(page, names, str(tmp_path))
    found = {
        "ledger.json": _lines(rows),
        "rest.json": _lines(rest),
        "commands.json": _lines(as_json),
        "tables.txt": tables,
        "pages.txt": await surfaces.pages(page, names),
    }
    known = [row["id"] for each in rows.values() for row in each if "id" in row]
    known_ids = [UUID(each) for each in known if isinstance(each, str) and len(each) == 36]
    ports = {f":{urlsplit(page.engine.url).port}": ":PORT1", f":{urlsplit(page.url).port}": ":PORT2"}
    ports |= {str(tmp_path): "FOLDER"}
    FILES.mkdir(exist_ok=True)
    differing: list[str] = []
    for name, text in found.items():
        text = surfaces.Renamed(iter(known_ids), ports)(text)
        file = FILES / name
        if os.environ.get(RECORD):
            file.write_text(text, encoding="utf-8")
            continue
        recorded = file.read_text(encoding="utf-8")
        differing += difflib.unified_diff(
            recorded.splitlines(), text.splitlines(), f"recorded {name}", f"found {name}", lineterm="", n=4
        )
    assert not differing, "\n".join(["differs; if it should: python -m tests.golden.record", *differing[:400]])


def _lines(found: Any) -> str:
    """JSON in lines, lists of numbers in one."""
    lines = NUMBERS.sub(lambda match: " ".join(match[0].split()), json.dumps(found, indent=1, ensure_ascii=False))
    return MEASURED.sub(r'"\1": "measured"', lines) + "\n"
