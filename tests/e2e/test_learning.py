"""Learning with real parts only: chat, ledger, Temporal, trainer and engine; the judge is a server over HTTP.

All of it is encrypted at rest: other tests learn from plain content.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from clawloop.encryption.key_file import SETTING, make_keys
from clawloop.local.checks import choose_port
from clawloop.local.parts import answers_ok
from clawloop.recipes.recipe import Recipe
from db.database import BACKGROUND_LIMIT, Database
from db.schema import migrate
from db.training.recipes import set_recipe
from tests.conftest import database_address, execute
from tests.e2e.adapters import LORA, apply_adapter, load_policy, logprobs
from tests.e2e.gateway import RealGateway, prepared, running_gateway
from tests.fakes.judge import FakeJudge, fake_judge
from tests.security.encrypted import dump

RECIPE = Recipe.model_validate(
    {
        "name": "binary",
        "signal": {"hints": False, "m": 1},
        "train": {
            "batch_samples": 16,
            "advantage": {"teacher_weight": 0.0},
            "lora": {"rank": LORA.rank, "alpha": LORA.alpha},
            # Random weights cannot get worse; one step has to have a visible effect.
            "optimiser": {"lr": 0.01},
        },
        # That step moves each token far more than the gate lets one step of a real model.
        "gate": {"parent_distance": 4.9, "token_share": 0.99},
    }
)
SESSIONS, TURNS = 4, 5
# Four Python programs start in parallel; 10 s on two idle cores.
START_SECONDS = 240
LIKED, DISLIKED = "Yes, like that.", "No, not like that."


def is_preferred(answer: str) -> bool:
    """True for an even number of characters: about half of the replies of random weights."""
    return len(answer) % 2 == 0


def vote_by_user_message(body: dict[str, Any], question: str) -> str:
    mark = re.findall(r"verdict ([0-9a-f]{6}):", question)[-1]
    return f"verdict {mark}: {1 if LIKED in question.rsplit('<next', 1)[-1] else -1}"


@pytest.fixture
async def judge() -> AsyncIterator[FakeJudge]:
    async with fake_judge() as running:
        running.says = vote_by_user_message
        yield running


@pytest.fixture
async def gateway(
    postgres_server: Any, temporal_address: str, engine_url: str, tmp_path: Path
) -> AsyncIterator[RealGateway]:
    execute(postgres_server.url, "CREATE DATABASE learned")
    url = database_address(postgres_server.url, "learned")
    await asyncio.to_thread(migrate, url)
    keys = await prepared(url, [engine_url])
    database = Database(url, BACKGROUND_LIMIT)
    await set_recipe(database, "default", RECIPE)
    await database.close()
    make_keys(tmp_path / "keys")
    encrypted = {SETTING: str(tmp_path / "keys")}
    try:
        async with running_gateway(url, keys, tmp_path, 0, TEMPORAL_ADDRESS=temporal_address, **encrypted) as running:
            yield running
    finally:
        async with httpx.AsyncClient(base_url=engine_url) as client:
            for model in (await client.get("/v1/models")).json()["data"]:
                if model["id"].startswith(("default-v", "anna-v")):  # other tests use the engine later
                    await client.post("/v1/unload_lora_adapter", json={"lora_name": model["id"]})


@asynccontextmanager
async def workers(
    gateway: RealGateway, temporal: str, judge: FakeJudge, engine: str, model: Path
) -> AsyncIterator[None]:
    settings = {
        "DATABASE_URL": gateway.database_url,
        "TEMPORAL_ADDRESS": temporal,
        "CLAWLOOP_DATA": str(gateway.data),
        SETTING: str(gateway.data / "keys"),
        "CLAWLOOP_MODEL": str(model),
        "CLAWLOOP_JUDGE_URL": judge.url,
        "CLAWLOOP_JUDGE_MODEL": "scripted",
        "OMP_NUM_THREADS": "1",
    }
    roles = (["orchestrator"], ["judge"], ["trainer", "--base-model", model.name], ["engine", "--engine", engine])
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for words in roles:
            port = choose_port(words[0], "127.0.0.1", 0, "")
            command = [sys.executable, "-m", "clawloop.cli.main", "worker", *words, "--health-port", str(port)]
            with (gateway.data / f"{words[0]}.log").open("ab") as log:
                running[port] = subprocess.Popen(command, env=dict(os.environ) | settings, stdout=log, stderr=log)
        async with asyncio.timeout(START_SECONDS):
            for port, worker in running.items():
                while not await answers_ok(f"http://127.0.0.1:{port}/readyz"):
                    assert worker.poll() is None, logs(gateway)
                    await asyncio.sleep(0.1)
        yield
    finally:
        for worker in running.values():
            worker.send_signal(signal.SIGTERM)
        ended = [await asyncio.to_thread(worker.wait, 60) for worker in running.values()]
    assert ended == [0] * len(running)


async def talk(gateway: RealGateway, session: int) -> list[str]:
    """A conversation in which the user rates each reply; returns the replies' ids."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Hello, I am user {session}."}]
    replies = []
    async with gateway.client() as client:
        for number in range(TURNS):
            body = {"model": "policy", "messages": messages, "max_tokens": 12, "temperature": 1.0}
            ends = {"session_id": f"s{session}", "session_done": number == TURNS - 1}
            answer = await client.post("/v1/chat/completions", json=body | ends)
            assert answer.status_code == 200, answer.text
            message = answer.json()["choices"][0]["message"]
            replies.append(answer.json()["id"])
            liked = is_preferred(message["content"] or "")
            messages += [message, {"role": "user", "content": LIKED if liked else DISLIKED}]
    return replies


async def admin(gateway: RealGateway, path: str) -> Any:
    headers = {"Authorization": f"Bearer {gateway.admin_key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=120) as client:
        answer = await client.get(f"/admin/v1/{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


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
        body = {"model": "policy", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 12}
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
    sessions = (await admin(gateway, "sessions"))["sessions"]
    turns = [turn for session in sessions for turn in (await admin(gateway, f"sessions/{session['id']}"))["turns"]]
    outcomes = "\n".join(f"{turn['id']} {turn['outcome']}: {turn['why']}" for turn in turns)
    raise AssertionError(f"{status}\n{outcomes}\n{logs(gateway)}")


def logs(gateway: RealGateway) -> str:
    return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(gateway.data.glob("*.log")))


def clawloop(gateway: RealGateway, *words: str) -> str:
    """Output of a command."""
    settings = dict(os.environ) | {"DATABASE_URL": gateway.database_url, "CLAWLOOP_DATA": str(gateway.data)}
    settings[SETTING] = str(gateway.data / "keys")
    done = subprocess.run(
        [sys.executable, "-m", "clawloop.cli.main", *words], env=settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_preference_in_chats_becomes_a_version_that_prefers_it(
    gateway: RealGateway,
    temporal_address: str,
    engine_url: str,
    tiny_model_path: Path,
    judge: FakeJudge,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with workers(gateway, temporal_address, judge, engine_url, tiny_model_path):
        began = time.monotonic()
        talks = await asyncio.gather(*(talk(gateway, session) for session in range(SESSIONS)))
        chatted = time.monotonic()
        status = await learned(gateway, lambda status: status["version"] == 1)
        answered = time.monotonic()
        assert (status["head"], status["step"], status["ready"]) == (1, 2, 0)

        # The new version replies, and the recorded log-probs are those of its adapter.
        (fresh, *_) = await talk(gateway, 99)
        newest = (await gateway.turn(fresh)).record
        assert newest.version == 1
        begun = await begin_another(gateway)
        assert (begun.policy, begun.version) == ("anna", 1)
    await _check_the_versions(gateway, tiny_model_path, talks, newest, begun)

    judged = [reply for replies in talks for reply in replies[:-1]]
    output = await asyncio.to_thread(clawloop, gateway, "why", judged[0])
    assert re.search(r"^outcome +trained$", output, re.MULTILINE), output
    assert "trained in step 1" in output
    versions = json.loads(await asyncio.to_thread(clawloop, gateway, "policy", "versions", "--json"))["versions"]
    assert [version["state"] for version in versions] == ["on the path", "active, head"]
    assert versions[1]["metrics"]["samples"] == len(judged)
    assert "No violation" in await asyncio.to_thread(clawloop, gateway, "check")
    _check_that_nothing_is_plain(gateway)
    with capsys.disabled():
        words = f"{chatted - began:.1f} s of chat, {answered - chatted:.1f} s to the next version"
        print(f"\n{SESSIONS * TURNS} turns, {len(judged)} samples, {words}")  # noqa: T201


def _check_that_nothing_is_plain(gateway: RealGateway) -> None:
    stored = dump(gateway.database_url)
    assert "binary" in stored  # the recipe: it is a dump
    files = [path.read_bytes() for path in gateway.data.rglob("*") if path.is_file()]
    for words in (LIKED, DISLIKED, "I am user"):
        assert words not in stored
        assert words.encode().hex() not in stored
        assert not any(words.encode() in file for file in files)


async def _check_the_versions(gateway: RealGateway, model: Path, talks: list[list[str]], *newest: Any) -> None:
    (adapter,) = (gateway.data / "adapters" / "default").glob("v1-*")
    policy = load_policy(model)
    moved: dict[bool, list[float]] = {True: [], False: []}
    for replies in talks:
        for reply in replies[:-1]:
            record = (await gateway.turn(reply)).record
            assert record.version == 0
            assert record.prompt_ids is not None
            assert record.response_ids is not None
            assert record.response is not None
            ids = (record.prompt_ids, record.response_ids, 1.0)
            apply_adapter(policy, None)
            before = logprobs(policy, *ids).mean().item()
            apply_adapter(policy, adapter)
            after = logprobs(policy, *ids).mean().item()
            moved[is_preferred(str(record.response["content"] or ""))].append(after - before)
    assert all(moved.values()), "this user liked all answers, or none"
    assert sum(moved[True]) / len(moved[True]) > 0 > sum(moved[False]) / len(moved[False]), moved

    apply_adapter(policy, adapter)
    for record in newest:
        assert record.logprobs is not None
        recomputed = logprobs(policy, record.prompt_ids, record.response_ids, 1.0).tolist()
        assert recomputed == pytest.approx(record.logprobs, abs=1e-3)
