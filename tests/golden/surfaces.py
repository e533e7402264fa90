"""What people and programs see of a ledger: answers of routes, output of commands, pages, and the rows themselves.

Ids and digests are renamed in the order in which a file names them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import datetime
from html.parser import HTMLParser
from typing import Any
from uuid import UUID

import httpx

from db.content import bytes_to_advantages, bytes_to_ids, bytes_to_logprobs
from db.tables import Base
from tests.contract.learning import PostgresLearning
from tests.ui.conftest import Page, Visitor
from tests.verbs import clawloop

WIDTH = "80"

REST = (
    *("policies", "policies/default/versions", "policies/default/versions/1", "policies/default/versions/2"),
    *("policies/default/events?limit=50", "policies/default/recipe", "policies/default/probes"),
    *("training", "training?policy=other", "engines", "keys", "status", "check", "judge/precision"),
    *("rollouts", "rollout-groups", "episodes", "episodes/{episode}"),
    *("sessions?limit=4", "sessions?fold=true&state=closed", "sessions?text=tides", "sessions?outcome=trained&limit=3"),
    *("sessions?verdict=-1", "sessions/tides?content=true", "sessions/tides?limit=1", "sessions/{tools}?content=true"),
    *("sessions/{rated session}?content=true", "turns/{blamed}?tokens=true", "turns/{praised}", "turns/{calls}"),
    *("turns/{failed}", "turns/{erased}", "turns/{rated}", "turns/{side}/why", "turns/{regenerated}/why"),
    *("turns/{narrow}/why", "turns/tides:1/why", "turns/last/why", "turns/nothing"),
    *("sessions/nothing", "policies/nothing/versions"),
)  # fmt: skip
MODELS = ("models", "models/default", "models/nothing")

COMMANDS = (
    "policy list",
    "policy versions",
    "policy version 1",
    "policy events",
    "recipe show",
    "probe list",
    "training status",
    "training status --policy other",
    "training liked",
    "engine list",
    "key list",
    "status",
    "check",
    "judge precision",
    "rollouts status",
    "rollouts groups",
    "episode list",
    "episode show {episode}",
    "session list --all --limit 5",
    "session list --text tides",
    "session show tides",
    "session show {tools} --full",
    "why tides:1",
    "why tides:1 --tokens",
    "why {failed}",
    "why nothing",
)
# They read a key's file or the network as well, or have no JSON.
WITHOUT_JSON = {"recipe show", "why tides:1 --tokens"}

PAGES = (
    *("", "/now", "/sessions", "/sessions?text=tides", "/sessions/{tides}", "/sessions/{tools}", "/turns/{blamed}"),
    *("/versions", "/versions/1", "/versions/2", "/rollouts", "/episodes/{episode}"),
    *("/engines", "/settings", "/probes?text=2", "/start"),
)


async def rest(page: Page, names: dict[str, UUID | str]) -> dict[str, Any]:
    admin, chat = ({"Authorization": f"Bearer {key}"} for key in (page.admin_key, names["chat key"]))
    found: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=page.url, timeout=60) as client:
        asked = [*((f"/admin/v1/{path}", admin) for path in REST), *((f"/v1/{path}", chat) for path in MODELS)]
        for path, headers in asked:
            answer = await client.get(path.format_map(names), headers=headers)
            found[path] = {"status": answer.status_code, "answer": answer.json()}
        for records in ("turns", "judgements"):
            path = f"/admin/v1/export?records={records}"
            exported = await client.get(path, headers=admin)
            found[path] = [json.loads(line) for line in exported.text.splitlines()]
    return found


async def commands(page: Page, names: dict[str, UUID | str], data: str) -> tuple[dict[str, Any], str]:
    """What commands print with `--json`, and for people."""
    settings = {"DATABASE_URL": page.database_url, "COLUMNS": WIDTH, "CLAWLOOP_DATA": data}

    as_json, tables = {}, []
    for command in COMMANDS:
        arguments = command.format_map(names).split()
        done = await asyncio.to_thread(clawloop, *arguments, **settings)
        failed = f"[{done.returncode}] {done.stderr}" if done.returncode else ""
        tables.append(f"$ clawloop {command}\n{done.stdout}{failed}")
        if command not in WITHOUT_JSON:
            done = await asyncio.to_thread(clawloop, *arguments, "--json", **settings)
            as_json[command] = json.loads(done.stdout) if done.stdout else done.stderr
    return as_json, "\n".join(tables)


async def pages(page: Page, names: dict[str, UUID | str]) -> str:
    """The words of each page, one piece a line."""
    async with page.visitor() as visitor:
        return "\n".join([await _page(visitor, path, names) for path in PAGES])


async def _page(visitor: Visitor, path: str, names: dict[str, UUID | str]) -> str:
    answer = await visitor.client.get(f"/ui{path}".format_map(names))
    words = _Words()
    words.feed(answer.text)
    return "\n".join([f"== /ui{path} {answer.status_code}", *words.found, ""])


class _Words(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style", "nav")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "nav")

    def handle_data(self, data: str) -> None:
        if not self._hidden and (words := " ".join(data.split())):
            self.found.append(words)


async def ledger(learning: PostgresLearning) -> dict[str, list[dict[str, Any]]]:
    """All rows without what is null: a column that is added later changes nothing."""
    found: dict[str, list[dict[str, Any]]] = {}
    for table in Base.metadata.sorted_tables:
        order = {"sessions": "created_at", "session_prefixes": "turn_id, role"}.get(
            table.name, ", ".join(f'"{column.name}"' for column in table.primary_key)
        )
        rows = await learning.rows(f'SELECT * FROM "{table.name}" ORDER BY {order}')
        found[table.name] = [{name: _plain(name, row) for name in sorted(row) if row[name] is not None} for row in rows]
    return found


def _plain(name: str, row: dict[str, Any]) -> Any:
    value = row[name]
    match name:
        case "prompt_ids" | "response_ids" | "hinted_prompts":
            return bytes_to_ids(value)
        case "logprobs":
            return bytes_to_logprobs(value, len(bytes_to_ids(row["response_ids"])))
        case "advantages" | "moves":
            return bytes_to_advantages(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, UUID) else value


class Renamed:
    """One file's text with ids and digests renamed in their order, and ports and measured seconds removed.

    Args:
        known: all ids of the ledger; their first eight digits are short forms of them.
    """

    # A judge's question and its answer have a mark that is made of ids.
    _MARK = re.compile(r"verdict [0-9a-f]{6}:")
    _NAMED = re.compile(
        r"(?<![0-9a-f])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<![0-9a-z])[0-9a-f]{8,64}(?![0-9a-z])"
    )

    def __init__(self, known: Iterator[UUID], ports: dict[str, str]) -> None:
        self._short = {str(each)[:8]: str(each) for each in known}
        self._ports = ports
        self._ids: dict[str, str] = {}
        self._digests: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        for port, name in self._ports.items():
            text = text.replace(port, name)
        text = self._MARK.sub("verdict MARK:", text)
        return self._NAMED.sub(self._rename, text)

    def _rename(self, match: re.Match[str]) -> str:
        said = match[0]
        full = self._short.get(said[:8])
        if full is not None and full.replace("-", "").startswith(said.replace("-", "")):
            return self._ids.setdefault(full, f"id{len(self._ids):06}")
        if "-" in said:
            return self._ids.setdefault(said, f"id{len(self._ids):06}")
        return said if len(said) < 12 else self._digests.setdefault(said[:12], f"digest{len(self._digests):06}")
