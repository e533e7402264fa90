"""A Harbor data set, unchanged, by verifiers in a worker with a Python environment of its own, through rollouts.

It needs podman or docker, and Python 3.12 or newer, which uv finds or fetches. What lies in Harbor's folder of
downloaded data sets is written here, as its registry is not reached from everywhere.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from clawloop.sandboxes.containers import ContainerEngine
from tests.e2e.foreign_worker import foreign_worker, settled_groups, worker_key
from tests.e2e.gateway import prepared, running_gateway
from tests.e2e.workers import running_workers
from tests.environments.foreign_python import foreign_python
from tests.fakes.engine import fake_engine
from tests.fakes.replies import Reply
from tests.sandboxes.local_image import import_image

SIZE = 2
WORDS = ("apple", "river", "stone", "cloud", "horse", "bread")
# How this machine's podman runs containers, where that is not its default.
FORWARDED = ("CONTAINERS_CONF", "DOCKER_HOST")
TEST = """
if [ "$(cat /app/shout.txt)" = {word} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
CONFIGURATION = """
[env.taskset]
dataset = "local/shouts"
[env.agent.harness]
id = "shell_once"
[env.agent.runtime]
type = "{runtime}"
"""


@pytest.fixture
def image() -> Iterator[str]:
    engine = ContainerEngine.find()
    name = f"localhost/clawloop-harbor:{uuid4().hex}"
    import_image(engine, name, "/app", {"app/found.txt": (b"it is the task's image\n", 0o644)})
    yield name
    engine.ask("rmi", "--force", name)


def write_data_set(home: Path, image: str) -> None:
    """As `harbor download --export` leaves it."""
    for word in WORDS:
        task = home / ".cache" / "harbor" / "local_shouts" / f"shout-{word}"
        for folder in ("environment", "tests"):
            (task / folder).mkdir(parents=True)
        (task / "task.toml").write_text(f'version = "1.0"\n[environment]\ndocker_image = "{image}"\n')
        (task / "environment" / "Dockerfile").write_text(f"FROM {image}\n")
        (task / "instruction.md").write_text(f"Write the word {word} in capitals to the file shout.txt.")
        (task / "tests" / "test.sh").write_text(TEST.format(word=word.upper()))


@pytest.mark.containers
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_episodes_of_a_harbor_data_set_are_scored_in_containers_and_make_samples(
    empty_postgres_url: str, temporal_address: str, tmp_path: Path, image: str
) -> None:
    packages = "verifiers[harbor]==0.4.0"
    installed = await asyncio.to_thread(foreign_python, tmp_path / "wheel", packages, version=">=3.12")
    home, runtime = tmp_path / "home", ContainerEngine.find().program.name
    write_data_set(home, image)
    (tmp_path / "harbor.toml").write_text(CONFIGURATION.format(runtime=runtime))
    right = itertools.cycle((True, False))
    async with fake_engine() as engine:
        engine.script = lambda body: _reply(body, right)
        keys = await prepared(empty_postgres_url, [engine.url])
        gateways = running_gateway(empty_postgres_url, keys, tmp_path / "data", TEMPORAL_ADDRESS=temporal_address)
        async with gateways as gateway:
            arguments = ["--verifiers", "harbor", "--verifiers-config", str(tmp_path / "harbor.toml")]
            arguments += ["--gateway", gateway.url, "--temporal", temporal_address, "--episodes", "2"]
            variables = {name: os.environ[name] for name in FORWARDED if name in os.environ}
            worker = foreign_worker(installed, arguments, home, await worker_key(empty_postgres_url), variables)
            orchestrator = running_workers(tmp_path, empty_postgres_url, temporal_address, ["orchestrator"])
            async with orchestrator, worker, gateway.client() as client:
                client.headers["Authorization"] = f"Bearer {gateway.admin_key}"
                started = {"environment": "harbor", "size": SIZE, "groups": 1}
                assert (await client.post("/admin/v1/rollouts/start", json=started)).status_code == 200
                groups = await settled_groups(client, 2)
                await client.post("/admin/v1/rollouts/pause", json={"reason": "enough"})
                episodes = (await client.get("/admin/v1/episodes", params={"limit": 500})).json()["episodes"]
    of_groups = [episode for episode in episodes if episode["group"] in {group["id"] for group in groups}]
    found = {(episode["state"], episode["ending"], episode["attempt"], episode["turns"]) for episode in of_groups}
    assert found == {("scored", "completed", 1, 1)}, [episode["reason"] for episode in of_groups]
    assert {episode["reward"] for episode in of_groups} == {0.0, 1.0}
    _check_samples(empty_postgres_url)


def _reply(body: dict[str, Any], right: itertools.cycle[bool]) -> Reply:
    found = re.search(r"Write the word (\w+) in capitals", body["messages"][0]["content"])
    assert found is not None
    word = found[1].upper() if next(right) else found[1]
    # In the task's own image, and not on this machine.
    return Reply(f"test -f /app/found.txt && echo {word} > shout.txt")


def _check_samples(url: str) -> None:
    with psycopg.connect(url) as connection:
        samples = connection.execute(
            "SELECT e.reward, s.reward FROM samples s JOIN turns t ON t.id = s.turn_id"
            " JOIN episodes e ON e.id = t.episode_id"
        ).fetchall()
    assert samples
    assert all((advantage > 0) == (reward == 1.0) for reward, advantage in samples)
