"""What environment workers without a database ask a gateway for, by their own client."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from api.admin.rollouts import ARTIFACT_BYTES
from clawloop.core.contracts.serving import Scope
from clawloop.core.errors import RecordUnusable, SetupError, StoreUnavailable
from clawloop.core.ids import new_episode_id
from clawloop.environments.artifacts import ArtifactFolder
from clawloop.environments.gateway import WorkerGateway
from tests.api.conftest import Gateway

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
