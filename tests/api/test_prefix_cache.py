"""What an engine keeps of prompts is found again by the same key alone: who shares it can measure who wrote what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from api.chat.request import cache_salt
from api.dependencies import Limits
from clawloop.core.contracts.serving import ApiKey, Policy, Scope
from clawloop.core.ids import EpisodeId, new_api_key_id
from tests.api.chat_requests import PATH, chat_body
from tests.api.conftest import Gateway, running_gateway
from tests.fakes.engine import FakeEngine

HEADERS = {"anthropic-version": "2023-06-01"}
BODIES: dict[str, dict[str, Any]] = {
    PATH: chat_body(),
    "/v1/completions": {"model": "policy", "prompt": "x"},
    "/v1/messages": {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"model": "policy", "input": "x"},
}


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/completions"])
async def test_each_key_has_a_cache_of_its_own(gateway: Gateway, path: str) -> None:
    other = gateway.keys.add("default", {Scope.CHAT})
    for secret in (gateway.key, gateway.key, other):
        async with gateway.client(secret) as client:
            assert (await client.post(path, json=BODIES[path], headers=HEADERS)).status_code == 200
    first, again, others = (request["cache_salt"] for request in gateway.engine.requests)
    assert first == again != others


@pytest.mark.parametrize("path", BODIES)
async def test_no_client_chooses_its_salt(gateway: Gateway, path: str) -> None:
    async with gateway.client() as client:
        refused = await client.post(path, json=BODIES[path] | {"cache_salt": "of another"}, headers=HEADERS)
    assert refused.status_code == 400
    assert "cache_salt" in refused.json()["error"]["message"]
    assert not gateway.engine.requests


async def test_a_salt_that_the_operator_lets_through_is_still_the_keys_own(tmp_path: Path, engine: FakeEngine) -> None:
    limits = Limits(engine_fields=("cache_salt",))
    async with running_gateway(tmp_path, engines=[engine], limits=limits) as gateway, gateway.client() as client:
        assert (await client.post(PATH, json=chat_body() | {"cache_salt": "of another"})).status_code == 200
        assert engine.requests[0]["cache_salt"] == str((await gateway.only_key()).id)


async def test_an_operator_can_let_all_keys_share(tmp_path: Path, engine: FakeEngine) -> None:
    limits = Limits(cache_per_key=False)
    async with running_gateway(tmp_path, engines=[engine], limits=limits) as gateway, gateway.client() as client:
        assert (await client.post(PATH, json=chat_body())).status_code == 200
    assert "cache_salt" not in engine.requests[0]


async def test_a_turns_sampling_does_not_name_it(gateway: Gateway) -> None:
    async with gateway.client() as client:
        await client.post(PATH, json=chat_body())
    (turn,) = await gateway.recorded()
    assert "cache_salt" not in turn.sampling


def test_attempts_at_one_task_share_their_prompt() -> None:
    keys = [
        ApiKey(new_api_key_id(), "default", frozenset({Scope.CHAT}), episode=EpisodeId(new_api_key_id()))
        for _ in range(2)
    ]
    person = ApiKey(new_api_key_id(), "default", frozenset({Scope.CHAT}))
    policies = [Policy(name, "base", (), 0, {}) for name in ("default", "other")]
    salts = {cache_salt(key, policies[0], Limits()) for key in keys}
    assert len(salts) == 1
    assert salts.isdisjoint({cache_salt(person, policies[0], Limits()), cache_salt(keys[0], policies[1], Limits())})
