"""What must hold after every fault, read from PostgreSQL, the engine and the disk."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psycopg

from clawloop.app.processes.operations import damaged_files
from clawloop.core.adapters.directory import check_version
from clawloop.core.contracts.turns import TurnStatus
from clawloop.core.errors import AdapterUnreadable, AdapterUnusable, StoreUnavailable
from clawloop.core.ids import turn_id_of, version_name
from db.database import BACKGROUND_LIMIT, Database
from db.invariants import committed_versions, violations
from tests.chaos.asked_again import asked_again, stored_answers
from tests.chaos.chatters import Seen
from tests.chaos.stack import ANSWERS, Stack

# Spooled turns enter once PostgreSQL is back; an engine's restart takes its rows away for a minute or two.
SETTLE_SECONDS = 240.0

# What may be violated for a while after a fault. All else no transaction may violate, not even for a moment.
SETTLING = frozenset(
    {
        "the active version is loaded where requests go",  # the engine's agent loads it again
        "every main turn of a closed session has an outcome",  # until a turn that comes late, from a spool, is judged
    }
)

# A request that was sent twice has two turns with the same reply, and nothing says which of them the client saw.
_STORED = """
    SELECT t.id::text, t.version, t.parent_turn_id::text, coalesce(p.reply_digest = b.reply_digest, false),
        t.status, t.response::text
    FROM unnest(%s::uuid[], %s::uuid[]) AS a(id, before) JOIN turns t ON t.id = a.id
        LEFT JOIN turns p ON p.id = t.parent_turn_id AND p.session_id = t.session_id
        LEFT JOIN turns b ON b.id = a.before
"""

_WAITING = """
    SELECT jsonb_build_object(
        'policy', (SELECT to_jsonb(p) - 'sampling' - 'aliases' FROM policies p WHERE p.id = 'default'),
        'step', (SELECT to_jsonb(s) - 'recipe' FROM steps s WHERE s.policy = 'default' ORDER BY s.n DESC LIMIT 1),
        'samples', (SELECT jsonb_object_agg(state, n) FROM (SELECT state, count(*) AS n FROM samples GROUP BY 1) a),
        'turns', (SELECT jsonb_object_agg(outcome, n) FROM (SELECT outcome, count(*) AS n FROM turns GROUP BY 1) a),
        'not announced', (SELECT count(*) FROM turns WHERE announced_at IS NULL AND kind = 'main'),
        'newest turn', (SELECT max(entered_at) FROM turns), 'now', now())::text
"""


class Verifier:
    """
    Attributes:
        checked: how many acknowledged replies have been looked up.
        compared: how often a version in the engine was compared with its row and its files.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._database = Database(stack.database_url, BACKGROUND_LIMIT)
        self.checked = 0
        self.compared = 0

    async def close(self) -> None:
        await self._database.close()

    async def problems(self, seen: Sequence[Seen]) -> list[str]:
        """What is wrong, once everything had time to settle; nothing is, if the product keeps its word."""
        found = await self._lost(seen[self.checked :])
        self.checked = len(seen)
        found += await self._violations()
        found += await self._wrong_weights()
        found += await asyncio.to_thread(self._asked_again)
        return found

    async def committed_steps(self) -> int:
        return int((await self._rows("SELECT count(*) FROM steps WHERE state = 'committed'"))[0][0])

    async def what_training_waits_for(self) -> str:
        """The policy, its newest step, and how many samples, turns and feedback are in which state, as JSON."""
        ((found,),) = await self._rows(_WAITING)
        return str(found)

    async def _lost(self, seen: Sequence[Seen]) -> list[str]:
        """Acknowledged replies that are not stored, or not as they were."""
        waiting = {str(turn_id_of(reply.response_id)): reply for reply in seen}
        deadline = time.monotonic() + SETTLE_SECONDS
        found: list[str] = []
        while waiting:
            adopted_late = []
            before_of = {
                turn: None if reply.before is None else str(turn_id_of(reply.before)) for turn, reply in waiting.items()
            }
            rows = await self._rows(_STORED, [*before_of], [*before_of.values()])
            for turn, version, parent, is_twin, status, response in rows:
                reply, before = waiting[turn], before_of[turn]
                if parent != before and not is_twin:  # it enters later, from a spool, and adopts this turn then
                    adopted_late.append(f"turn {turn} has the parent {parent}, not {before}")
                    continue
                del waiting[turn]
                if reply.model != version_name("default", version, self._stack.base_model):
                    found.append(f"turn {turn} was answered by {reply.model}, and is stored with version {version}")
                # Not read by PostgreSQL: no text of its holds a NUL, which a random model writes.
                text = (json.loads(response)["content"] or "") if response else ""
                if text != reply.text or status not in (TurnStatus.COMPLETE, TurnStatus.LENGTH):
                    found.append(f"turn {turn} is stored as {status} with the text {text!r}, not {reply.text!r}")
            if time.monotonic() > deadline:
                missing = [f"acknowledged turn {turn} of {reply}: lost or elsewhere" for turn, reply in waiting.items()]
                return found + adopted_late + missing
            if waiting:
                await asyncio.sleep(0.3)
        return found

    async def _violations(self) -> list[str]:
        deadline = time.monotonic() + SETTLE_SECONDS
        lasting: dict[str, None] = {}
        while True:
            try:
                violated = await violations(self._database)
                versions = await committed_versions(self._database)
            except StoreUnavailable as error:
                violated, versions, away = [], [], str(error)
            else:
                away = ""
            damaged = await asyncio.to_thread(damaged_files, versions, self._stack.data / "adapters")
            lasting |= {f"{one.invariant}: {one.row}": None for one in violated if one.invariant not in SETTLING}
            found = [f"{one.invariant}: {one.row}" for one in violated if one.invariant in SETTLING]
            found += [f"{one.invariant}: {one.row}" for one in damaged] + ([away] if away else [])
            if not found or time.monotonic() > deadline:
                return [*lasting, *found]
            await asyncio.sleep(0.5)

    async def _wrong_weights(self) -> list[str]:
        """Versions in the engine whose files are not those of their rows."""
        try:
            async with httpx.AsyncClient(base_url=self._stack.engine_url, timeout=120) as client:
                models = (await client.get("/v1/models")).json()["data"]
        except httpx.TransportError:
            return []  # it restarts, with no version
        roots = {model["id"]: Path(model["root"]) for model in models if model["parent"] is not None}
        rows = await self._rows(
            "SELECT v.policy, v.n, v.path, encode(v.sha256, 'hex') FROM versions v JOIN engine_versions e"
            " ON e.policy = v.policy AND e.version = v.n WHERE v.n > 0"
        )
        found = []
        for policy, n, path, sha256 in rows:
            name = version_name(policy, n, "")
            if name not in roots:
                continue  # unloaded since the list was read
            self.compared += 1
            if roots[name] != (self._stack.data / "adapters" / path).resolve():
                found.append(f"{name} is {roots[name]} in the engine, and {path} in PostgreSQL")
                continue
            try:
                await asyncio.to_thread(check_version, roots[name], sha256)
            except (AdapterUnusable, AdapterUnreadable) as error:
                found.append(f"{name} is served with wrong files: {error}")
        return found

    def _asked_again(self) -> list[str]:
        judge = self._stack.judge
        return judge.unknown + asked_again(judge.questions, stored_answers(self._stack.database_url), ANSWERS)

    async def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Retries while PostgreSQL is away."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(self._stack.database_url) as connection:
                    return await (await connection.execute(query, values)).fetchall()
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.2)
