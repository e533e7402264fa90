"""Images and containers of a real podman or docker; what every sandbox has to keep is in test_bubblewrap.py."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest

from clawloop.core.contracts.episodes import Ending
from clawloop.core.errors import RecordUnusable
from clawloop.core.ids import new_episode_id
from clawloop.environments.harbor import HarborEnvironment, HarborTask
from clawloop.environments.runner import SandboxRunner
from clawloop.sandboxes.boxes import BoxTask
from clawloop.sandboxes.containers import OWNER_LABEL, ContainerEngine, Containers, SandboxesByImage
from clawloop.sandboxes.folders import BoxFolders
from tests.environments.scripted_model import bash_call, model
from tests.sandboxes.test_bubblewrap import ROOT, files_of, open_folder, wait_until
from tests.verbs import clawloop_process

pytestmark = pytest.mark.containers
__all__ = ["open_folder"]


def names(folders: BoxFolders) -> list[str]:
    return ContainerEngine.find().named_with(f"{OWNER_LABEL}={folders.owner}")


async def test_what_the_image_has_in_its_working_folder_is_there_and_can_be_changed(image: str) -> None:
    task = BoxTask("test", ("sh", "-c", "./run.sh; cat hello.txt; rm hello.txt"), 30.0, image=image)
    done = await Containers.find(BoxFolders()).run(task)
    assert (done.exit_code, done.output, done.problem) == (0, b"ran\nhello\n", None)
    assert list(files_of(done)) == ["run.sh"]


async def test_an_image_that_is_nowhere_is_one_line() -> None:
    containers = Containers.find(BoxFolders())
    with pytest.raises(RecordUnusable, match="the image localhost/none:1 cannot be pulled: ") as raised:
        await containers.run(BoxTask("test", ("true",), 5.0, image="localhost/none:1"))
    assert "\n" not in str(raised.value)


def test_an_image_without_python_is_refused() -> None:
    engine = ContainerEngine.find()
    name = f"localhost/clawloop-empty:{uuid4().hex}"
    subprocess.run([engine.program, "import", "-", name], input=bytes(10240), check=True, capture_output=True)
    try:
        with pytest.raises(RecordUnusable, match="it has no python3"):
            asyncio.run(Containers.find(BoxFolders()).run(BoxTask("test", ("true",), 5.0, image=name)))
    finally:
        engine.ask("rmi", name)


async def test_nothing_is_left_of_a_container_whose_caller_is_cancelled(open_folder: Path, image: str) -> None:
    folders = BoxFolders(open_folder)
    containers = Containers.find(folders)
    for seconds in (0.0, 0.2, 3.0):  # it is being made, or runs
        running = asyncio.create_task(containers.run(BoxTask("test", ("sleep", "600"), 600.0, image=image)))
        while not list(open_folder.glob("*/box/config.json")):
            await asyncio.sleep(0.01)
        await asyncio.sleep(seconds)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert list(open_folder.iterdir()) == []
        assert names(folders) == []


@pytest.mark.parametrize("whole_group", [False, True])
def test_nothing_is_left_of_the_containers_of_a_killed_worker(open_folder: Path, image: str, whole_group: bool) -> None:
    """Also where what started the container died with the worker, so that nothing but the sweep removes it."""
    folders = BoxFolders(open_folder)
    command = [sys.executable, "-m", "tests.sandboxes.endless", str(open_folder), "word", image]
    worker = subprocess.Popen(command, cwd=ROOT)
    engine = ContainerEngine.find()
    running = ("ps", "--filter", f"label={OWNER_LABEL}={folders.owner}", "--format", "{{.Names}}")
    wait_until(lambda: b"endless" in engine.ask(*running).stdout)
    if whole_group:
        worker.send_signal(signal.SIGSTOP)  # its end of the pipe stays open until the sweep
        for process in psutil.Process(worker.pid).children():
            process.kill()
    worker.kill()
    worker.wait()
    assert Containers.find(folders).sweep() in (0, 1)  # the end of its input may have ended it already
    wait_until(lambda: names(folders) == [])
    assert folders.sweep() == 1
    assert list(open_folder.iterdir()) == []


def test_a_task_directory_that_names_an_image_is_checked_in_it(tmp_path: Path, image: str) -> None:
    for name, which in (("good", image), ("bad", "localhost/none:1")):
        folder = tmp_path / name
        for inner in ("tests", "solution", "environment/files"):
            (folder / inner).mkdir(parents=True)
        (folder / "task.toml").write_text(f'[environment]\ndocker_image = "{which}"\n')
        (folder / "instruction.md").write_text("Write what run.sh says and more.txt to both.txt.\n")
        (folder / "environment" / "files" / "more.txt").write_text("more\n")
        (folder / "solution" / "solve.sh").write_text("(./run.sh; cat more.txt) > both.txt\n")
        script = '[ "$(cat both.txt)" = "ran\nmore" ] && won=1 || won=0\necho $won > /logs/verifier/reward.txt\n'
        (folder / "tests" / "test.sh").write_text(script)
    done = clawloop_process("environment", "check", str(tmp_path), "--json")
    rows = {Path(row["task"]).name: row for row in json.loads(done.stdout)}
    assert (rows["good"]["usable"], rows["good"]["rewards"], rows["good"]["why"]) == ("yes", "1, 0, 0", "")
    assert rows["bad"]["usable"] == "no"
    assert "the image localhost/none:1 cannot be pulled" in rows["bad"]["why"]


async def test_an_episode_is_played_and_verified_in_containers(image: str) -> None:
    """Our agent reaches the model by the socket, works in the image's folder, and what it leaves is scored."""
    script = b'[ "$(cat out.txt)" = ran ] && won=1 || won=0\necho $won > /logs/verifier/reward.txt\n'
    tasks = [HarborTask(f"Write what run.sh says to {n}.", {}, {"test.sh": script}, {}, image=image) for n in range(9)]
    environment = HarborEnvironment("images", tasks)

    def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {"content": "Done."} if messages[-1]["role"] == "tool" else bash_call("./run.sh > out.txt")

    folders = BoxFolders()
    async with model(reply, tool="bash") as gateway:
        runner = SandboxRunner(SandboxesByImage.find(folders, environment.images), {"images": environment}, gateway)
        episode = new_episode_id()
        run = await runner.run_agent("images", "train-0", episode, "key")
        assert (run.ending, run.reason) == (Ending.COMPLETED, "")
        assert await runner.verify("images", "train-0", episode, run.artifact) == (1.0, "")
    assert names(folders) == []
