"""An environment of verifiers, unchanged, in a worker with a Python environment of its own, through rollouts."""

from __future__ import annotations

import asyncio
import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.e2e.foreign_worker import foreign_worker, settled_groups, worker_key
from tests.e2e.gateway import prepared, running_gateway
from tests.e2e.workers import running_workers
from tests.environments.foreign_python import FOREIGN, foreign_python
from tests.fakes.engine import fake_engine
from tests.fakes.replies import Reply

SIZE = 4


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_episodes_of_verifiers_are_scored_and_make_samples(
    empty_postgres_url: str, temporal_address: str, tmp_path: Path
) -> None:
    installed = await asyncio.to_thread(foreign_python, tmp_path / "wheel")
    right = itertools.cycle((True, False))
    async with fake_engine() as engine:
        engine.script = lambda body: _reply(body, right)
        keys = await prepared(empty_postgres_url, [engine.url])
        gateways = running_gateway(
            empty_postgres_url, keys, tmp_path / "data", TEMPORAL_ADDRESS=temporal_address, CLAWLOOP_ARTIFACT_DAYS="3"
        )
        async with gateways as gateway:
            key = await worker_key(empty_postgres_url)
            arguments = [
                "--verifiers",
                "vf_sums",
                "--reward-range",
                "0",
                "2",
                "--gateway",
                gateway.url,
                "--temporal",
                temporal_address,
            ]
            worker = foreign_worker(installed, arguments, tmp_path, key)
            orchestrator = running_workers(tmp_path, empty_postgres_url, temporal_address, ["orchestrator"])
            async with orchestrator, worker as log, gateway.client() as client:
                client.headers["Authorization"] = f"Bearer {gateway.admin_key}"
                started = {"environment": "vf_sums", "size": SIZE, "groups": 2}
                assert (await client.post("/admin/v1/rollouts/start", json=started)).status_code == 200
                groups = await settled_groups(client, 3)
                await client.post("/admin/v1/rollouts/pause", json={"reason": "enough"})
                episodes = (await client.get("/admin/v1/episodes", params={"limit": 500})).json()["episodes"]
    assert "What is" not in log.read_text()
    of_groups = [episode for episode in episodes if episode["group"] in {group["id"] for group in groups}]
    assert len(of_groups) == SIZE * len(groups)
    assert {(episode["state"], episode["ending"], episode["attempt"]) for episode in of_groups} == {
        ("scored", "completed", 1)
    }
    # Weighted as the environment says, by what it found in the conversation itself.
    assert {episode["reward"] for episode in of_groups} == {0.0, 1.0}
    assert {episode["turns"] for episode in of_groups} == {2}
    assert all(len(episode["sessions"]) == 1 for episode in of_groups)
    for episode in of_groups:
        digest = episode["artifact_sha256"]
        assert (tmp_path / "data" / "artifacts" / digest[:2] / f"{digest}.tar").is_file()
    _check_samples(empty_postgres_url)


def _reply(body: dict[str, Any], right: itertools.cycle[bool]) -> Reply:
    messages = body["messages"]
    if len(messages) == 1:
        return Reply("wait")
    found = re.fullmatch(r"What is (\d+) \+ (\d+)\? One number\.", messages[0]["content"])
    assert found is not None
    return Reply(str(int(found[1]) + int(found[2]) + (0 if next(right) else 1)))


def _check_samples(url: str) -> None:
    with psycopg.connect(url) as connection:
        samples = connection.execute(
            "SELECT e.reward, s.reward FROM samples s JOIN turns t ON t.id = s.turn_id"
            " JOIN episodes e ON e.id = t.episode_id"
        ).fetchall()
        sampled = connection.execute("SELECT DISTINCT t.sampling->>'temperature' FROM turns t").fetchall()
    assert samples
    assert all((advantage > 0) == (reward == 1.0) for reward, advantage in samples)
    # The environment asked for 0.7, which cannot be trained.
    assert [float(temperature) for (temperature,) in sampled] == [1.0]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_tasks_with_images_that_cannot_be_had_are_refused_in_one_line(tmp_path: Path) -> None:
    """By the worker itself, before it reaches for Temporal or a gateway."""
    installed = foreign_python(tmp_path / "wheel")
    command = [str(installed / "clawloop-environment"), "--verifiers", "vf_images", "--temporal", "127.0.0.1:9"]
    done = subprocess.run(
        command,
        env={"PATH": str(tmp_path), "HOME": str(tmp_path), "CLAWLOOP_WORKER_KEY": "key", "PYTHONPATH": str(FOREIGN)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    why = "clawloop-environment: --verifiers vf_images: its tasks name images, and the runtime `subprocess` has none"
    assert (done.returncode, done.stderr.splitlines()[-1].startswith(why)) == (1, True), done.stderr
    assert "Traceback" not in done.stderr
