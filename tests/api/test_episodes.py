"""Episodes over HTTP: their keys, their workers, a judge asked through a gateway."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from api.admin.rollouts import ARTIFACT_BYTES
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.turns import TurnKind
from clawloop.core.errors import RecordUnusable, SetupError, StoreUnavailable
from clawloop.core.ids import new_episode_id, new_turn_id
from clawloop.core.judging.prompts import AnswerForm, JudgeReply, vote_prompt
from clawloop.environments.artifacts import ArtifactFolder
from clawloop.environments.gateway import WorkerGateway
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import JudgeClient
from tests.api.chat_requests import chat, chat_body
from tests.api.conftest import Gateway, running_gateway, until
from tests.fakes.engine import FakeEngine
from tests.fakes.notifier import FakeNotifier
from tests.unit.judging.conversations import evidence

# Chat with an episode's key: what is sent, recorded and refused.

CHAT = "/v1/chat/completions"


def episode_key(gateway: Gateway) -> tuple[object, str]:
    key, secret = gateway.keys.add_episode("default", datetime.now(UTC) + timedelta(hours=1))
    return key.episode, secret


async def test_the_clients_sampling_is_replaced_and_recorded(gateway: Gateway) -> None:
    episode, secret = episode_key(gateway)
    asked: dict[str, Any] = {"temperature": 0.2, "top_p": 0.5, "top_k": 5, "presence_penalty": 1.0, "min_p": 0.1}
    asked |= {"parallel_tool_calls": False, "seed": 7}
    async with gateway.client(secret) as client:
        answer = await client.post(CHAT, json=chat_body(**asked))
    assert answer.status_code == 200
    (record,) = await gateway.recorded()
    assert record.episode_id == episode
    assert record.sampling["asked"] == asked
    sent = {name: record.sampling.get(name) for name in asked}
    assert sent == {"temperature": 1.0, "top_p": 1.0, "top_k": -1} | dict.fromkeys(
        ("presence_penalty", "min_p", "parallel_tool_calls", "seed")
    )
    request = gateway.engine.requests[-1]
    assert {"asked", "seed"}.isdisjoint(request)
    assert (request["temperature"], request["top_p"], request["top_k"]) == (1.0, 1.0, -1)


async def test_a_client_that_asks_for_nothing_has_nothing_recorded(gateway: Gateway) -> None:
    _, secret = episode_key(gateway)
    async with gateway.client(secret) as client:
        assert (await client.post(CHAT, json=chat_body())).status_code == 200
    (record,) = await gateway.recorded()
    assert "asked" not in record.sampling
    assert record.sampling["temperature"] == 1.0  # not the policy's own for chats


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"guided_regex": "a+"}, "guided decoding"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"n": 2}, "`n`"),
    ],
)
async def test_what_could_not_be_trained_is_refused(gateway: Gateway, fields: dict[str, Any], named: str) -> None:
    _, secret = episode_key(gateway)
    async with gateway.client(secret) as client:
        answer = await client.post(CHAT, json=chat_body(**fields))
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
    assert gateway.turns.records == []


async def test_a_task_that_reads_like_a_side_prompt_is_a_main_turn(gateway: Gateway) -> None:
    _, secret = episode_key(gateway)
    title = "### Task:\nGenerate a concise, 3-5 word title\n<chat_history></chat_history>"
    messages = [{"role": "user", "content": title}]
    async with gateway.client(secret) as client:
        assert (await client.post(CHAT, json=chat_body(messages=messages))).status_code == 200
    async with gateway.client() as client:
        assert (await client.post(CHAT, json=chat_body(messages=messages))).status_code == 200
    kinds = [record.kind for record in await gateway.recorded(2)]
    assert kinds == [TurnKind.MAIN, TurnKind.SIDE]


async def test_an_episode_gives_no_feedback(gateway: Gateway) -> None:
    _, secret = episode_key(gateway)
    async with gateway.client(secret) as client:
        answer = await client.post("/v1/feedback", json={"response_id": "chatcmpl-0", "rating": "up"})
    assert answer.status_code == 403
    assert "verifier alone" in answer.json()["error"]["message"]


async def test_an_episodes_turns_follow_the_active_version_within_a_chain_of_tool_calls(
    engine: FakeEngine, tmp_path: Path
) -> None:
    """A chat stays on its version there."""
    async with running_gateway(tmp_path, engines=[engine], active=1, versions=frozenset({1})) as gateway:
        _, secret = episode_key(gateway)
        asked = chat_body("TOOL")["messages"]
        answers = {}
        for key in (gateway.key, secret):
            async with gateway.client(key) as client:
                answer = await client.post(CHAT, json=chat_body("TOOL"))
            answers[key] = answer.json()["choices"][0]["message"]
        gateway.directory.set_active(2, versions=frozenset({1, 2}))
        await until(lambda: gateway.services.directory.policy("default").active == 2)
        for key, expected in ((gateway.key, 1), (secret, 2)):
            result = {"role": "tool", "tool_call_id": "t1", "content": "42"}
            async with gateway.client(key) as client:
                answer = await client.post(CHAT, json=chat_body(messages=[*asked, answers[key], result]))
            assert answer.status_code == 200, answer.text
            assert answer.headers["X-Clawloop-Version"] == str(expected)


async def test_equal_prompts_of_two_episodes_are_two_sessions(gateway: Gateway) -> None:
    for _ in range(2):
        _, secret = episode_key(gateway)
        async with gateway.client(secret) as client:
            assert (await client.post(CHAT, json=chat_body())).status_code == 200
    first, second = await gateway.recorded(2)
    assert first.api_key_id != second.api_key_id
    assert first.messages == second.messages
    stored = [await gateway.turns.load(record.turn_id) for record in (first, second)]
    assert len({turn.session_id for turn in stored if turn is not None}) == 2


async def test_no_session_workflow_is_notified(engine: FakeEngine, tmp_path: Path) -> None:
    notifier = FakeNotifier()
    async with running_gateway(tmp_path, engines=[engine], notifier=notifier) as gateway:
        _, secret = episode_key(gateway)
        async with gateway.client(secret) as client:
            assert (await client.post(CHAT, json=chat_body())).status_code == 200
        await chat(gateway)  # its notification comes after the episode's would have come
        await until(lambda: len(gateway.turns.announced) == 1)
    assert len(notifier.sent) == 1


# What environment workers without a database ask a gateway for, by their own client.

WORKER = "/admin/v1/worker"
LEFT = b"a tar archive"
NAME = sha256(LEFT).hexdigest()


@pytest.fixture
def worker_key(gateway: Gateway) -> str:
    return gateway.keys.add("default", frozenset({Scope.WORKER}))


async def test_a_worker_gets_the_key_of_an_episode_that_runs(gateway: Gateway, worker_key: str) -> None:
    running, ended = new_episode_id(), new_episode_id()
    gateway.episode_keys.running[running] = "ce_key"
    async with WorkerGateway.open(gateway.url, worker_key, patience_seconds=0) as asking:
        await asking.check()
        assert await asking.key_of(running) == "ce_key"
        with pytest.raises(RecordUnusable, match="409"):
            await asking.key_of(ended)
    async with gateway.client(worker_key) as client:
        answer = await client.post(f"{WORKER}/episodes/{running}/key")
        assert answer.headers["cache-control"] == "no-store"
        answer = await client.post(f"{WORKER}/episodes/{ended}/key")
        assert (answer.status_code, answer.json()["code"]) == (409, "episode_not_running")


async def test_an_artifact_is_kept_by_its_digest_and_comes_back(gateway: Gateway, worker_key: str) -> None:
    async with WorkerGateway.open(gateway.url, worker_key, patience_seconds=0) as asking:
        assert await asking.store(LEFT) == await asking.store(LEFT) == NAME
        assert await asking.load(NAME) == LEFT
        for missing in ("0" * 64, ""):
            with pytest.raises(RecordUnusable):
                await asking.load(missing)
    # The same place as that of workers with the data folder.
    assert await gateway.services.artifacts.load(NAME) == LEFT


async def test_artifacts_are_bounded_and_must_have_their_digest(gateway: Gateway, worker_key: str) -> None:
    async with gateway.client(worker_key) as client:
        answer = await client.put(f"{WORKER}/artifacts/{NAME}", content=LEFT + b"!")
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_value")
        large = bytes(ARTIFACT_BYTES + 1)
        answer = await client.put(f"{WORKER}/artifacts/{sha256(large).hexdigest()}", content=large)
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
        answer = await client.put(f"{WORKER}/artifacts/..%2F..%2Fkeys", content=LEFT)
        assert answer.status_code in (400, 404)


async def test_a_full_disk_keeps_no_artifact(gateway: Gateway, worker_key: str, tmp_path: Path) -> None:
    kept = gateway.services.artifacts
    gateway.services.artifacts = ArtifactFolder(tmp_path, min_free_bytes=2**60)
    try:
        async with gateway.client(worker_key) as client:
            answer = await client.put(f"{WORKER}/artifacts/{NAME}", content=LEFT)
        assert (answer.status_code, answer.json()["code"]) == (503, "artifacts_full")
        assert answer.headers["retry-after"]
        async with WorkerGateway.open(gateway.url, worker_key, patience_seconds=0.3) as asking:
            with pytest.raises(StoreUnavailable, match="503"):
                await asking.store(LEFT)
    finally:
        gateway.services.artifacts = kept


async def test_no_other_key_is_a_workers_and_a_workers_is_for_nothing_else(gateway: Gateway, worker_key: str) -> None:
    async with WorkerGateway.open(gateway.url, gateway.key, patience_seconds=0) as asking:
        with pytest.raises(SetupError, match="--scope worker"):
            await asking.check()
    async with gateway.client(worker_key) as client:
        assert (await client.get("/admin/v1/episodes")).status_code == 403
        assert (await client.get("/v1/models")).status_code == 403


async def test_a_gateway_that_is_away_is_asked_again_for_some_time() -> None:
    async with WorkerGateway.open("http://127.0.0.1:9", "key", patience_seconds=0.3) as asking:
        await asking.check()
        with pytest.raises(StoreUnavailable):
            await asking.key_of(new_episode_id())


# A judge asked through a gateway: its answers name the turns that the gateway records.


@pytest.mark.parametrize("votes", [1, 3])
async def test_each_answer_names_its_turn(fresh_gateway: Gateway, votes: int) -> None:
    gateway = fresh_gateway
    prompt = vote_prompt(new_turn_id(), evidence())
    relayed, direct = (Endpoint(url, "policy", gateway.key) for url in (gateway.url, gateway.engine.url))
    async with JudgeClient(lambda _: [relayed], AnswerForm.FREE) as judge:
        answers = await judge.answers("default", prompt, votes, 0.6)
    async with JudgeClient(lambda _: [direct], AnswerForm.FREE) as judge:
        assert {answer.reply for answer in await judge.answers("default", prompt, votes, 0.6)} == {None}
    turns = sorted(await gateway.recorded(votes), key=lambda turn: turn.choice)
    first = turns[0].turn_id
    assert [answer.reply for answer in answers] == [JudgeReply(first, choice) for choice in range(votes)]
    assert [turn.choice for turn in turns] == list(range(votes))
    assert {turn.group_id for turn in turns} == {first if votes > 1 else None}
    assert [turn.kind.value for turn in turns] == ["main"] * votes
