"""Why an episode failed reaches the ledger in words that help, and no conversation does; on a real Temporal."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from temporalio.client import Client
from temporalio.worker import Worker

from clawloop.core.contracts.episodes import AgentRun, GroupState, NewGroup
from clawloop.core.episodes.running import EnvironmentActivities, EpisodeRunner, KeyOfEpisode, environment_queue
from clawloop.core.ids import EpisodeId, new_rollout_group_id
from clawloop.environments.gateway import WorkerGateway
from clawloop.environments.harbor import HarborEnvironment, HarborTask
from clawloop.environments.runner import SandboxRunner
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.containers import Containers, SandboxesByImage
from clawloop.sandboxes.folders import BoxFolders
from tests.fakes.episode_store import FakeEpisodeStore
from tests.sandboxes.test_bubblewrap import open_folder
from tests.sandboxes.test_containers import stand_in
from tests.workflows.scripted_rollouts import Artifacts, ScriptedRunner, orchestrating
from workflows import names
from workflows.rollouts import RolloutGroupWorkflow

__all__ = ["open_folder"]

NOT_ENOUGH = "0 of 2 episodes have a reward, 2 are needed; for example: "


async def reasons_of(
    client: Client, environment: str, runner: EpisodeRunner | None = None, key_of: KeyOfEpisode | None = None
) -> tuple[set[str], str]:
    """Those of the episodes of a group, each once, and the group's."""
    store = FakeEpisodeStore()
    scripted = ScriptedRunner(store)
    group = NewGroup(new_rollout_group_id(), "default", environment, "train-0", 2)
    await store.make_group(group)
    activities = EnvironmentActivities(key_of or store.key_of, runner or scripted, Artifacts())
    queue = environment_queue(environment)
    async with (
        orchestrating(client, store, scripted),
        Worker(client, task_queue=queue, activities=[activities.run_episode, activities.verify_episode]),
    ):
        result = await client.execute_workflow(
            RolloutGroupWorkflow.run,
            group.id,
            id=names.rollout_group_workflow_id(group.id),
            task_queue=names.WORKFLOW_QUEUE,
        )
    assert result.state is GroupState.DROPPED
    return {episode.reason for episode in store.by_id.values()}, result.reason


def with_image() -> HarborEnvironment:
    """Tasks with an image."""
    tasks = [HarborTask(f"task {number}", {}, {}, {}, image="debian:12") for number in range(8)]
    return HarborEnvironment("with-image", tasks)


async def test_an_image_that_cannot_be_pulled_is_told_where_episodes_are_shown(
    client: Client,
    tmp_path: Path,
    open_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stand_in(tmp_path, monkeypatch, "docker").write("image", "")
    folders = BoxFolders(open_folder)
    sandboxes = SandboxesByImage(Bubblewrap(Path("/bwrap"), folders, "python3"), Containers.find(folders), folders)
    runner = SandboxRunner(sandboxes, {"with-image": with_image()}, ("127.0.0.1", 9))
    why = "the image debian:12 cannot be pulled: denied: requested access"
    with caplog.at_level(logging.WARNING):
        assert await reasons_of(client, "with-image", runner) == ({why}, f"{NOT_ENOUGH}{why}")
    assert {vars(record)["why"] for record in caplog.records if record.message == "activity failed"} == {why}


async def test_a_worker_without_the_environment_says_so(client: Client) -> None:
    runner = SandboxRunner(Bubblewrap(Path("/bwrap"), BoxFolders(Path("/tmp")), "python3"), {}, ("127.0.0.1", 9))
    reasons, _ = await reasons_of(client, "tasks-elsewhere", runner)
    assert reasons == {"this worker has no environment 'tasks-elsewhere'"}


async def test_a_refused_key_of_a_worker_is_told_with_its_remedy(client: Client) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=401, text="the key ck_secret is not known")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        async with WorkerGateway.open(url, "ck_secret", patience_seconds=0) as gateway:
            [reason], _ = await reasons_of(client, "tool-call", key_of=gateway.key_of)
    assert reason == (
        f"the gateway at {url}/admin/v1/worker refuses the key (401): make one by"
        " `clawloop key create --scope worker`, and set CLAWLOOP_WORKER_KEY"
    )


class Quoting:
    """Satisfies `EpisodeRunner`; its error quotes the agent."""

    async def require_usable(self, environment: str, task_id: str) -> None:
        pass

    async def run_agent(self, environment: str, task_id: str, episode: EpisodeId, key: str) -> AgentRun:
        raise ValueError("the agent said: my password is 1234")

    async def verify(
        self, environment: str, task_id: str, episode: EpisodeId, artifact: bytes
    ) -> tuple[float | None, str]:
        raise NotImplementedError


async def test_the_text_of_any_other_error_stays_with_the_worker(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        reasons, of_group = await reasons_of(client, "tool-call", Quoting())
    assert (reasons, of_group) == ({"ValueError"}, f"{NOT_ENOUGH}ValueError")
    assert "1234" not in caplog.text
    assert {vars(record)["why"] for record in caplog.records if record.message == "activity failed"} == {None}
