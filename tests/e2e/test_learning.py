"""Learning with real parts only: a user teaches the demo's model, which judges itself on the engine that answers.

All of it is encrypted at rest: other tests learn from plain content.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from clawloop.app.demo.recipes import Method, demo_recipe
from clawloop.app.demo.user import SyntheticUser
from clawloop.app.demo.world import CHAT, Axis, draw_preference
from clawloop.core.encryption.key_file import SETTING, make_keys
from clawloop.core.ids import TurnId
from clawloop.core.recipes.recipe import Lora
from tests.e2e.adapters import LORA, apply_adapter, load_policy, logprobs
from tests.e2e.gateway import RealGateway
from tests.e2e.toy import Conversation, admin, converse_all, outcomes, toy_gateway, toy_workers
from tests.security.encrypted import dump

_DEMO = demo_recipe(Method.COMBINED)
RECIPE = _DEMO.model_copy(
    update={
        "train": _DEMO.train.model_copy(update={"batch_samples": 16, "lora": Lora(rank=LORA.rank, alpha=LORA.alpha)}),
        "gate": _DEMO.gate.model_copy(update={"held_out": 0.0}),
    }
)
# 28 replies that somebody reacts to: a batch, and no second one.
SESSIONS = 7
# The user prefers the other style of about every second answer.
SEED = 4


@pytest.fixture
async def gateway(
    postgres_server: Any, temporal_address: str, toy_engine_url: str, tmp_path: Path
) -> AsyncIterator[RealGateway]:
    make_keys(tmp_path / "keys")
    encrypted = {SETTING: str(tmp_path / "keys")}
    url, engine = postgres_server.url, toy_engine_url
    async with toy_gateway(url, "learned", tmp_path, engine, temporal_address, **encrypted) as running:
        await admin(running, "policies/default/recipe", RECIPE.model_dump())
        yield running


def users(name: str, count: int) -> dict[str, SyntheticUser]:
    """One user's sessions, each with requests and reactions of its own."""
    preference = draw_preference(SEED)
    return {f"{name}{number}": SyntheticUser(SEED * 1000 + number, preference) for number in range(count)}


async def begin_another(gateway: RealGateway) -> Any:
    """A policy that begins from version 1, and the record of its first answer by it."""
    headers = {"Authorization": f"Bearer {gateway.admin_key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=120) as client:
        made = await client.post("/admin/v1/policies", json={"name": "anna", "version": 1})
        assert (made.status_code, made.json()["head"]) == (201, 1), made.text
        key = (await client.post("/admin/v1/keys", json={"policy": "anna", "name": "anna"})).json()["key"]
        async with asyncio.timeout(120):
            while (await admin(gateway, "training?policy=anna"))["version"] != 1:
                await asyncio.sleep(0.1)
        messages = [{"role": "user", "content": CHAT[Axis.TONE][0].text}]
        body = {"model": "policy", "messages": messages, "max_tokens": 12}
        answer = await client.post(
            "/v1/chat/completions", json=body | {"temperature": 1.0}, headers={"Authorization": f"Bearer {key}"}
        )
    assert answer.status_code == 200, answer.text
    return (await gateway.turn(answer.json()["id"])).record


async def learned(gateway: RealGateway, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    status: dict[str, Any] = {}
    with suppress(TimeoutError):
        async with asyncio.timeout(600):
            while not done(status := await admin(gateway, "training")):
                await asyncio.sleep(0.2)
            return status
    raise AssertionError(f"{status}\n{outcomes(gateway.database_url)}\n{logs(gateway)}")


def logs(gateway: RealGateway) -> str:
    return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(gateway.data.glob("*.log")))


def clawloop(gateway: RealGateway, *words: str) -> str:
    """Output of a command."""
    settings = dict(os.environ) | {"DATABASE_URL": gateway.database_url, "CLAWLOOP_DATA": str(gateway.data)}
    settings[SETTING] = str(gateway.data / "keys")
    done = subprocess.run(
        [sys.executable, "-m", "clawloop.app.cli.main", *words],
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
async def test_a_preference_in_chats_becomes_a_version_that_prefers_it(
    gateway: RealGateway,
    temporal_address: str,
    toy_engine_url: str,
    toy_model_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = {SETTING: str(gateway.data / "keys")}
    async with toy_workers(gateway, temporal_address, toy_engine_url, toy_model_path, **keys):
        began = time.monotonic()
        talks = await converse_all(gateway, users("s", SESSIONS))
        chatted = time.monotonic()
        status = await learned(gateway, lambda status: status["version"] == 1 and status["judging"] == 0)
        answered = time.monotonic()
        assert (status["head"], status["step"]) == (1, 2)

        # The new version replies, and the recorded log-probs are those of its adapter.
        ((fresh, *_),) = [talk.replies for talk in await converse_all(gateway, users("later", 1))]
        newest = (await gateway.turn(fresh)).record
        assert newest.version == 1
        begun = await begin_another(gateway)
        assert (begun.policy, begun.version) == ("anna", 1)
    batch = _batch(gateway)
    assert len(batch) == RECIPE.train.batch_samples
    await _check_the_versions(gateway, toy_model_path, batch, newest, begun)

    output = await asyncio.to_thread(clawloop, gateway, "why", str(next(iter(batch))))
    assert re.search(r"^outcome +trained$", output, re.MULTILINE), output
    assert "trained in step 1" in output
    versions = json.loads(await asyncio.to_thread(clawloop, gateway, "policy", "versions", "--json"))["versions"]
    assert [version["state"] for version in versions] == ["on the path", "active, head"]
    assert versions[1]["metrics"]["samples"] == len(batch)
    assert "No violation" in await asyncio.to_thread(clawloop, gateway, "check")
    _check_that_nothing_is_plain(gateway, talks)
    with capsys.disabled():
        words = f"{chatted - began:.1f} s of chat, {answered - chatted:.1f} s to the next version"
        print(f"\n{sum(len(talk.replies) for talk in talks)} turns, {len(batch)} samples, {words}")  # noqa: T201


def _batch(gateway: RealGateway) -> dict[TurnId, tuple[int, bool]]:
    """The turns of step 1, each with the judge's verdict (0: none to learn from) and whether there was a hint."""
    with psycopg.connect(gateway.database_url) as connection:
        rows = connection.execute("""
            SELECT s.turn_id, s.reward, s.hinted_prompts IS NOT NULL FROM step_samples b
                JOIN samples s ON s.id = b.sample_id WHERE b.step = 1 AND b.policy = 'default'""").fetchall()
    return {TurnId(turn): (int(reward or 0), hinted) for turn, reward, hinted in rows}


def _check_that_nothing_is_plain(gateway: RealGateway, talks: Sequence[Conversation]) -> None:
    stored = dump(gateway.database_url)
    assert f'"{RECIPE.name}"' in stored  # it is a dump
    files = [path.read_bytes() for path in gateway.data.rglob("*") if path.is_file()]
    lines = {line for talk in talks for said in talk.said for line in said.splitlines() if len(line) > 15}
    assert len(lines) > SESSIONS
    for words in lines:
        assert words not in stored
        assert words.encode().hex() not in stored
        assert not any(words.encode() in file for file in files)


async def _check_the_versions(
    gateway: RealGateway, model: Path, batch: Mapping[TurnId, tuple[int, bool]], *newest: Any
) -> None:
    (adapter,) = (gateway.data / "adapters" / "default").glob("v1-*")
    policy = load_policy(model)
    moved: dict[int, list[float]] = {1: [], -1: []}
    for turn, (verdict, _) in batch.items():
        record = (await gateway.turn(f"chatcmpl-{turn}")).record
        assert record.version == 0
        assert record.prompt_ids is not None
        assert record.response_ids is not None
        ids = (record.prompt_ids, record.response_ids, 1.0)
        apply_adapter(policy, None)
        before = logprobs(policy, *ids).mean().item()
        apply_adapter(policy, adapter)
        after = logprobs(policy, *ids).mean().item()
        if verdict:
            moved[verdict].append(after - before)
    assert all(moved.values()), "this user liked all answers, or none"
    assert sum(moved[1]) / len(moved[1]) > 0 > sum(moved[-1]) / len(moved[-1]), moved
    assert any(hinted for _, hinted in batch.values()), "the judge gave no hint"

    apply_adapter(policy, adapter)
    for record in newest:
        assert record.logprobs is not None
        recomputed = logprobs(policy, record.prompt_ids, record.response_ids, 1.0).tolist()
        assert recomputed == pytest.approx(record.logprobs, abs=1e-3)
