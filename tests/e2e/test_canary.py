"""A canary with real parts only: two versions on one engine, verdicts of the demo's own judge, and both decisions.

The first version learns what its user likes and is found better than the base model. The second learns from somebody
who wants the opposite, by a step that is far too large, and its gate is wide open: half of the conversations get it,
until their verdicts say that it is worse.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from os import environ
from pathlib import Path
from typing import Any

import psycopg
import pytest

from clawloop.app.demo.recipes import Method, demo_recipe
from clawloop.app.demo.user import SyntheticUser
from clawloop.app.demo.world import Axis, Preference, Style, flipped
from clawloop.app.temporal.plugin import connect
from clawloop.core.gate.canary import MIN_SESSIONS
from clawloop.core.ids import TurnId, turn_id_of
from clawloop.core.recipes.recipe import Recipe
from clawloop.serving.adapters import VllmControl
from tests.e2e.adapters import LORA, apply_adapter, load_policy, logprobs
from tests.e2e.gateway import RealGateway
from tests.e2e.toy import Conversation, admin, converse_all, outcomes, toy_gateway, toy_workers
from workflows import names

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(2400)]

# The styles that the base model has least: it answers two fifths of the requests in them.
LIKES: Preference = {Axis.CODE: Style.JAVASCRIPT, Axis.LENGTH: Style.CONCISE, Axis.TONE: Style.FRIENDLY}
BATCH = 32
# Of them come one batch and a part of another.
TEACHING = 14
# Of each version. In process a step of this recipe brought eight users from 0.35 to 0.5 of the answers in their style
# to 0.68 to 0.92, and with so many sessions a difference of 0.15 is found.
SESSIONS = 80
# A loaded machine needs minutes for what takes seconds.
PATIENCE_SECONDS = 600


def recipe(m: int) -> Recipe:
    """One step teaches what others take ten for, or ruins the model; the gate lets it pass.

    Args:
        m: votes of a judgement; another number makes waiting samples expire.
    """
    content = demo_recipe(Method.COMBINED).model_dump()
    content["signal"] |= {"m": m}
    content["train"] |= {"batch_samples": BATCH, "lora": {"rank": LORA.rank, "alpha": LORA.alpha}}
    content["train"]["optimiser"] |= {"epochs": 5, "lr": 0.0035}
    content["train"]["loss"] |= {"clip_low": 0.9, "clip_high": 4.0, "dual_clip": 10.0}
    wide = {"parent_distance": 4.9, "base_distance": 4.9, "token_share": 1.0, "loss": 1e9, "grad_norm": 1e9}
    content["gate"] |= {"held_out": 0.0, "canary_share": 0.5, **wide}
    return Recipe.model_validate(content)


class Chats:
    """Sessions by users of a preference; each user has requests and reactions of their own."""

    def __init__(self, gateway: RealGateway) -> None:
        self._gateway = gateway
        self._count = 0

    async def chat(self, preference: Preference, sessions: int) -> list[Conversation]:
        first, self._count = self._count, self._count + sessions
        numbers = range(first, self._count)
        users = {f"s{number}": SyntheticUser(number, preference) for number in numbers}
        return await converse_all(self._gateway, users)

    async def versions(self, talks: list[Conversation]) -> list[set[int]]:
        """The versions that answered in each of these sessions."""
        known: dict[TurnId | None, int] = {}
        turns = [[turn_id_of(reply) for reply in talk.replies] for talk in talks]
        wanted = [turn for of_session in turns for turn in of_session]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(known) < len(wanted):  # on a busy machine a turn may wait in the spool
                known = await asyncio.to_thread(self._read, wanted)
        return [{known[turn] for turn in of_session} for of_session in turns]

    def _read(self, turns: list[TurnId | None]) -> dict[TurnId | None, int]:
        with psycopg.connect(self._gateway.database_url) as connection:
            return dict(connection.execute("SELECT id, version FROM turns WHERE id = ANY(%s)", [turns]).fetchall())


async def status(gateway: RealGateway, n: int, state: str) -> dict[str, Any]:
    """The status of training, once version n is in this state and every turn is judged."""
    found: dict[str, Any] = {}
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                is_there = (await states(gateway)).get(n) == state
                found = await admin(gateway, "training")
                if is_there and found["judging"] == 0:
                    return found
                await asyncio.sleep(0.3)
    except TimeoutError:
        raise AssertionError(f"{await states(gateway)}, {found}\n{outcomes(gateway.database_url)}") from None


async def states(gateway: RealGateway) -> dict[int, str]:
    return {
        version["n"]: version["state"] for version in (await admin(gateway, "policies/default/versions"))["versions"]
    }


@asynccontextmanager
async def sweep_by_hand(temporal: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """The sweep, which decides about canaries, runs when it is asked to and not each minute: so it looks at as many
    sessions as the test has, whatever the machine does beside."""
    schedule = (await connect(temporal)).get_schedule_handle(names.SWEEP_ID)
    await schedule.pause(note="a test runs it by hand")
    try:
        yield schedule.trigger
    finally:
        await schedule.unpause()


@pytest.fixture
async def gateway(
    postgres_server: Any, temporal_address: str, toy_engine_url: str, tmp_path: Path
) -> AsyncIterator[RealGateway]:
    url, data = postgres_server.url, tmp_path / "data"
    async with toy_gateway(url, "canary", data, toy_engine_url, temporal_address) as running:
        yield running


async def test_verdicts_make_a_better_canary_the_version_of_all_and_roll_a_worse_one_back(
    gateway: RealGateway, temporal_address: str, toy_engine_url: str, toy_model_path: Path, capsys: Any
) -> None:
    chats = Chats(gateway)
    await admin(gateway, "policies/default/recipe", recipe(3).model_dump())
    async with (
        toy_workers(gateway, temporal_address, toy_engine_url, toy_model_path),
        sweep_by_hand(temporal_address) as sweep,
    ):
        # Version 1 learns what the user likes, and is tried by half of the conversations.
        begun = await taught(gateway, chats, LIKES, 1)
        assert "no traffic: 0 judged sessions of the canary and 0 of the version before" in begun["reason"]
        await tried(gateway, chats, {0, 1}, SESSIONS)
        await sweep()
        await status(gateway, 1, "active, head")
        first = await check(gateway, 1)
        assert (first["result"], first["reason"].partition(":")[0]) == ("passed", "better"), first
        assert await chats.versions(await chats.chat(LIKES, 6)) == [{1}] * 6

        # Version 2 learns the opposite. Samples of the chats before expire: another [signal].
        await admin(gateway, "policies/default/recipe", recipe(1).model_dump())
        await taught(gateway, chats, flipped(LIKES, list(Axis)), 2)
        talks = await tried(gateway, chats, {1, 2}, MIN_SESSIONS)
        async with VllmControl(toy_engine_url, gateway.data) as control:
            assert {"default-v1", "default-v2"} <= set(await control.names())
        await until_worse(gateway, chats, sweep)
        worse = await status(gateway, 2, "rolled back")
        assert (worse["head"], worse["version"]) == (1, 1)
        second = await check(gateway, 2)
        assert (second["result"], second["reason"].partition(":")[0]) == ("failed", "worse"), second
        assert await chats.versions(await chats.chat(LIKES, 6)) == [{1}] * 6
    await _check_each_reply_is_of_its_version(gateway, toy_model_path, talks)
    _check_what_became_of_its_samples(gateway)
    with capsys.disabled():
        print(f"\nversion 1: {first['reason']}\nversion 2: {second['reason']}")  # noqa: T201


async def taught(gateway: RealGateway, chats: Chats, preference: Preference, n: int) -> dict[str, Any]:
    """The status once version n, which learned from users of this preference, is a canary that nobody has yet.

    Training is paused while they chat, so that no session of theirs gets it, and again so that no batch follows.
    """
    why = {"reason": "the test has the samples it wants"}
    await admin(gateway, "training/pause", why)
    await chats.chat(preference, TEACHING)
    await status(gateway, n - 1, "active, head")
    await admin(gateway, "training/resume", {})
    begun = await status(gateway, n, "canary, head")
    assert (begun["head"], begun["version"]) == (n, n - 1)
    await admin(gateway, "training/pause", why)
    # A session that is open when the gateway reads of the canary may go on with it; those that begin later stay.
    async with asyncio.timeout(PATIENCE_SECONDS):
        while {n} not in await chats.versions(await chats.chat(LIKES, 16)):
            pass
    return begun


async def until_worse(gateway: RealGateway, chats: Chats, sweep: Callable[[], Awaitable[None]]) -> None:
    """Chat and sweep until the canary has ended, whatever it was found to be."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await states(gateway))[2] == "canary, head":
            await sweep()
            await chats.chat(LIKES, 16)
            await asyncio.sleep(1)


async def tried(gateway: RealGateway, chats: Chats, versions: set[int], sessions: int) -> list[Conversation]:
    """Chat until each version has answered so many sessions, all of them judged. A session stays on its version."""
    talks: list[Conversation] = []
    answered: list[set[int]] = []
    while min(answered.count({version}) for version in versions) < sessions:
        more = await chats.chat(LIKES, 16)
        talks += more
        answered += await chats.versions(more)
    assert [each for each in answered if len(each) > 1 or each - versions] == []
    await status(gateway, max(versions), "canary, head")
    return talks


async def check(gateway: RealGateway, n: int) -> Any:
    """What the canary's check found about a version."""
    versions = (await admin(gateway, "policies/default/versions"))["versions"]
    (found,) = [each for each in versions[n]["gate"] if each["name"] == "canary"]
    return found


async def _check_each_reply_is_of_its_version(gateway: RealGateway, model: Path, talks: list[Conversation]) -> None:
    """The recorded log-probs are those of the version that the ledger names, and not of the other."""
    policy = load_policy(model)
    records = [(await gateway.turn(talk.replies[0])).record for talk in talks[:16]]
    folder = gateway.data / "adapters" / "default"
    for n, other in ((1, 2), (2, 1)):
        of_version = [record for record in records if record.version == n]
        assert of_version
        for record in of_version:
            assert record.prompt_ids
            assert record.response_ids
            assert record.logprobs
            off = {}
            for version in (n, other):
                (adapter,) = folder.glob(f"v{version}-*")
                apply_adapter(policy, adapter)
                found = logprobs(policy, record.prompt_ids, record.response_ids, 1.0).tolist()
                off[version] = max(abs(a - b) for a, b in zip(found, record.logprobs, strict=True))
            assert off[n] < 1e-3 < 0.1 < off[other], (n, off)


def _check_what_became_of_its_samples(gateway: RealGateway) -> None:
    """No later step takes them, and the ledger is whole."""
    said = outcomes(gateway.database_url).splitlines()
    assert sum("trained in step 2, rolled back to 1" in line for line in said) == BATCH, said
    command = [sys.executable, "-m", "clawloop.app.cli.main", "check", "--data", str(gateway.data)]
    settings = dict(environ) | {"DATABASE_URL": gateway.database_url}
    checked = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert "No violation" in checked.stdout, checked.stdout + checked.stderr
