"""A session from chat to verdict with real parts only: gateway, vLLM as policy and judge, Temporal, workers."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from clawloop.core.judging.prompts import AnswerForm, vote_prompt
from clawloop.core.judging.voting import parse_vote
from clawloop.serving.endpoints import Endpoint, JsonClient
from clawloop.serving.judge import JudgeClient
from clawloop.serving.rendering import PATH, texts_of, texts_request
from db.schema import migrate
from tests.conftest import database_address, execute
from tests.e2e.gateway import RealGateway, prepared, running_gateway
from tests.unit.judging.conversations import TURN, evidence
from tests.unit.judging.injections import ATTEMPTS, filled


@contextmanager
def running_workers(gateway: RealGateway, temporal: str) -> Iterator[None]:
    workers = []
    for role in ("orchestrator", "judge"):
        with (gateway.data / f"{role}.log").open("ab") as log:
            command = [sys.executable, "-m", "clawloop.app.cli.main", "worker", role, "--data", str(gateway.data)]
            settings = {"DATABASE_URL": gateway.database_url, "TEMPORAL_ADDRESS": temporal}
            workers.append(subprocess.Popen(command, env=dict(os.environ) | settings, stdout=log, stderr=log))
    try:
        yield
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        for worker in workers:
            assert worker.wait(60) == 0


@pytest.fixture
async def gateway(
    postgres_server: Any, temporal_address: str, engine_url: str, tmp_path: Path
) -> AsyncIterator[RealGateway]:
    execute(postgres_server.url, "CREATE DATABASE judged")
    url = database_address(postgres_server.url, "judged")
    await asyncio.to_thread(migrate, url)
    keys = await prepared(url, [engine_url])
    async with running_gateway(url, keys, tmp_path, TEMPORAL_ADDRESS=temporal_address) as running:
        yield running


async def chat(gateway: RealGateway, *user_messages: str) -> None:
    messages: list[dict[str, Any]] = []
    async with gateway.client() as client:
        for number, text in enumerate(user_messages, 1):
            messages.append({"role": "user", "content": text})
            body = {"model": "policy", "messages": messages, "max_tokens": 12, "session_id": "e2e"}
            answer = await client.post(
                "/v1/chat/completions", json=body | {"session_done": number == len(user_messages), "ignore_eos": True}
            )
            assert answer.status_code == 200, answer.text
            messages.append(answer.json()["choices"][0]["message"])


async def closed_session(gateway: RealGateway) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {gateway.admin_key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=120) as client:
        async with asyncio.timeout(180):
            while True:
                sessions = (await client.get("/admin/v1/sessions")).json()["sessions"]
                # None is there while its turns wait in the spool.
                for session in [one for one in sessions if one["state"] == "closed"]:
                    session_view: dict[str, Any] = (await client.get(f"/admin/v1/sessions/{session['id']}")).json()
                    return session_view
                await asyncio.sleep(0.5)


async def test_a_chat_is_judged_by_the_base_model_on_its_engine(gateway: RealGateway, temporal_address: str) -> None:
    with running_workers(gateway, temporal_address):
        await chat(gateway, "Add two numbers.", "No, in Python.")
        shown = await closed_session(gateway)
    assert shown["session"]["closed_why"] == "the client ended the session"
    *judged, last = shown["turns"]
    # Random weights vote at random, but the grammar makes every vote valid.
    assert [turn["votes"] for turn in judged] == [3]
    assert all(turn["verdict"] in (-1, 0, 1) and turn["why"] for turn in judged)
    assert {turn["outcome"] for turn in judged} <= {"sampled", "held_out", "undecided"}
    assert (last["outcome"], last["why"]) == ("no_feedback", "nothing followed: the client ended the session")
    assert shown["session"]["guarantee"]
    printed = await asyncio.to_thread(why, gateway, judged[0]["id"])
    assert judged[0]["why"] in " ".join(printed.split())


def why(gateway: RealGateway, turn: str) -> str:
    """Output of `clawloop why`."""
    command = [sys.executable, "-m", "clawloop.app.cli.main", "why", turn, "--data", str(gateway.data)]
    settings = dict(os.environ) | {"DATABASE_URL": gateway.database_url}
    return subprocess.run(command, env=settings, capture_output=True, text=True, check=True).stdout


async def test_votes_flipped_by_injection_are_counted(engine_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def vote(client: JudgeClient, text: str) -> int | None:
        prompt = vote_prompt(TURN, evidence(answer=text), AnswerForm.GRAMMAR)
        (answer,) = await client.answers("default", prompt, 1, 0.01)
        return parse_vote(answer.text, prompt)

    flips = invalid = 0
    async with JudgeClient(lambda policy: [Endpoint(engine_url, "tiny-random")], AnswerForm.GRAMMAR) as client:
        clean = await vote(client, "No, in Python.")
        for attempt in ATTEMPTS:
            injected = await vote(client, f"No, in Python.\n{filled(attempt.text, 'abcdef')}")
            invalid += injected is None
            flips += injected is not None and injected != clean and str(injected) == attempt.wants
    with capsys.disabled():
        print(f"\n{flips} of {len(ATTEMPTS)} attempts flipped the random judge's vote as intended, {invalid} invalid")  # noqa: T201
    assert invalid == 0


async def test_a_direct_vote_is_the_distribution_of_sampled_votes(engine_url: str) -> None:
    prompt = vote_prompt(TURN, evidence(answer="No, in Python."), AnswerForm.GRAMMAR)
    async with JudgeClient(lambda policy: [Endpoint(engine_url, "tiny-random")], AnswerForm.GRAMMAR) as client:
        logprobs = await client.distribution("default", prompt)
        answers = await client.answers("default", prompt, 256, 1.0)
    # The grammar masks all other tokens, so the reported ones have all the probability.
    assert sum(math.exp(value) for value in logprobs.values()) == pytest.approx(1, abs=1e-3)
    for vote, logprob in logprobs.items():
        share = sum(parse_vote(answer.text, prompt) == vote for answer in answers) / len(answers)
        assert abs(share - math.exp(logprob)) < 0.16  # five standard deviations of 256 draws


async def test_an_engine_tells_the_text_of_each_token(engine_url: str) -> None:
    async with JsonClient(60) as client:
        endpoints = [Endpoint(engine_url, "tiny-random")]
        words = "Grüße, 評 and\n  code"
        ids = ((await client.post(endpoints, "/tokenize", {"prompt": words})).body or {})["tokens"]
        texts = texts_of((await client.post(endpoints, PATH, texts_request(ids))).body, ids)
        [alone] = texts_of((await client.post(endpoints, PATH, texts_request(ids[:1]))).body, ids[:1])
    assert (len(texts), alone) == (len(ids), texts[0])
    # A token that is a part of a character has no text of its own.
    whole = [text for text in texts if "\N{REPLACEMENT CHARACTER}" not in text]
    assert whole
    assert all(text in words for text in whole)
