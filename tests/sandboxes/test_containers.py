"""What containers are started with and what becomes of them, with a stand-in for podman or docker that notes calls."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from clawloop.core.contracts.episodes import Ending
from clawloop.core.errors import RecordUnusable, SandboxFailed, SetupError
from clawloop.core.ids import new_episode_id
from clawloop.environments.harbor import HarborEnvironment, HarborTask
from clawloop.environments.runner import SandboxRunner
from clawloop.sandboxes.boxes import BoxTask, Limits
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.containers import ContainerEngine, Containers, SandboxesByImage, image_of
from clawloop.sandboxes.folders import BoxFolders
from tests.sandboxes.test_bubblewrap import MIB, open_folder

__all__ = ["open_folder"]

STAND_IN = """#!{python}
import json, os, pathlib, sys, time
here, words = pathlib.Path(__file__).parent, sys.argv[1:]
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
def file(name):
    return (here / name).read_text() if (here / name).exists() else ""
if words[0] == "info":
    sys.exit(file("info") or 0)
elif words[0] == "--version":
    print(file("version"))
elif words[:2] == ["image", "inspect"]:
    print("sha256:abc", file("image") or sys.exit("no such image"))
elif words[:2] == ["image", "ls"]:
    print("sha256:def", "sha256:abc" if file("image") else "")
    sys.exit(file("info") or 0)
elif words[0] == "pull":
    (here / "image").write_text(file("pulled") or sys.exit("denied:\\n requested access"))
elif words[0] == "ps":
    print(file("names"))
elif words[0] == "run":
    os.kill(os.getpid(), 9) if file("killed") else None
    if file("stderr"):
        print(file("stderr"), file=sys.stderr)
        sys.exit(125)
    if file("exit"):
        sys.exit(int(file("exit")))
    print(json.dumps({{"exit_code": 0, "output": 0, "artifact": 0, "problem": None}}), flush=True)
    sys.stdin.read() if file("waits") else None
"""


@dataclass(frozen=True, slots=True)
class StandIn:
    folder: Path

    def write(self, name: str, content: str) -> None:
        (self.folder / name).write_text(content)

    def calls(self, first: str) -> list[list[str]]:
        noted = (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []
        return [words for words in map(json.loads, noted) if words[0] == first]


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> StandIn:
    folder = tmp_path / "programs"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(STAND_IN.format(python=sys.executable))
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    made = StandIn(folder)
    made.write("version", "podman version 4.3.1" if name == "podman" else "Docker version 29.0.0")
    made.write("image", json.dumps({"WorkingDir": "/app", "Env": ["PATH=/opt/bin:/bin"], "Volumes": {"/data": {}}}))
    return made


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_in(tmp_path, monkeypatch, "podman")


@pytest.fixture
def folders(open_folder: Path) -> BoxFolders:
    return BoxFolders(open_folder)


def task(**fields: object) -> BoxTask:
    return BoxTask("episode-1", ("true",), 5.0, image="debian:12", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["podman", "docker"])
async def test_a_container_is_started_with_every_limit_and_its_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: BoxFolders, name: str
) -> None:
    engine = stand_in(tmp_path, monkeypatch, name)
    limits = Limits(memory_bytes=100 * MIB, processes=7, disk_bytes=MIB, open_files=20)
    await Containers.find(folders).run(task(limits=limits, folders={"/agent": tmp_path}))
    words = engine.calls("run")[-1]
    assert {
        "--rm",
        "--pull=never",
        "--network=none",
        "--read-only",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--pids-limit=7",
        f"--memory={105 * MIB}",  # five folders are in memory
        f"--memory-swap={105 * MIB}",
        "--ulimit=nofile=20:20",
        "--log-driver=none",
        "--entrypoint=python3",
        "sha256:abc",
        f"--mount=type=bind,source={tmp_path},target=/agent,readonly",
    } <= set(words)
    in_memory = [words[place + 1] for place, word in enumerate(words) if word == "--tmpfs"]
    assert [one.partition(":")[0] for one in in_memory] == ["/app", "/tmp", "/logs", "/artifact", "/data"]
    assert all(f"size={MIB}," in one and ("notmpcopyup" in one) == (name == "podman") for one in in_memory)
    assert ("--http-proxy=false" in words) == (name == "podman")
    labels = [words[place + 1] for place, word in enumerate(words) if word == "--label"]
    assert labels == [f"clawloop.owner={folders.owner}", "clawloop.episode=episode-1"]
    box = words[words.index("--name") + 1]
    assert engine.calls("rm")[-1] == ["rm", "--force", "--volumes", box]
    assert not folders.in_use(box)


async def test_a_worker_looks_into_an_image_once(podman: StandIn, folders: BoxFolders) -> None:
    containers = Containers.find(folders)
    await asyncio.gather(*(containers.run(task()) for _ in range(3)))
    assert len(podman.calls("image")) == 1
    assert len(podman.calls("run")) == 4  # one copies what is in its working folder
    assert not podman.calls("pull")


async def test_an_image_that_cannot_be_pulled_is_one_line_and_is_not_asked_for_again(
    podman: StandIn, folders: BoxFolders, caplog: pytest.LogCaptureFixture
) -> None:
    podman.write("image", "")
    containers = Containers.find(folders)
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        with pytest.raises(RecordUnusable, match=r"the image debian:12 cannot be pulled: denied: requested access$"):
            await containers.run(task())
    assert len(podman.calls("pull")) == 1
    ours = [record.message for record in caplog.records if record.name.startswith("clawloop")]
    assert ours == ["pulling an image, which is not on this machine"]
    assert not podman.calls("run")


async def test_an_image_that_was_removed_is_pulled_again_at_the_next_attempt(
    podman: StandIn, folders: BoxFolders
) -> None:
    containers = Containers.find(folders)
    await containers.run(task())
    podman.write("pulled", (podman.folder / "image").read_text())
    podman.write("image", "")
    podman.write("stderr", "Error: sha256:abc: image not known")
    with pytest.raises(SandboxFailed, match="image not known"):
        await containers.run(task())
    assert not podman.calls("pull")
    podman.write("stderr", "")
    assert (await containers.run(task())).exit_code == 0
    assert podman.calls("pull") == [["pull", "--quiet", "debian:12"]]


@pytest.mark.parametrize("away", [False, True])
async def test_an_image_that_is_there_or_cannot_be_looked_for_is_kept(
    podman: StandIn, folders: BoxFolders, away: bool
) -> None:
    containers = Containers.find(folders)
    await containers.run(task())
    podman.write("stderr", "Error: no space left")
    if away:
        podman.write("image", "")
        podman.write("info", "cannot connect")
    with pytest.raises(SandboxFailed, match="no space left"):
        await containers.run(task())
    podman.write("stderr", "")
    assert (await containers.run(task())).exit_code == 0
    assert [words[1] for words in podman.calls("image")] == ["inspect", "ls"]


async def test_a_container_that_was_not_made_is_no_fault_of_the_command(podman: StandIn, folders: BoxFolders) -> None:
    podman.write("stderr", "Error: no space left")
    with pytest.raises(SandboxFailed, match="no space left"):
        await Containers.find(folders).run(task())


async def test_an_engine_that_is_killed_is_no_fault_of_the_command(podman: StandIn, folders: BoxFolders) -> None:
    podman.write("killed", "yes")
    with pytest.raises(SandboxFailed, match="podman was ended by signal 9"):
        await Containers.find(folders).run(task())


async def test_containers_that_are_killed_are_no_fault_of_agent_or_verifier(
    podman: StandIn, folders: BoxFolders
) -> None:
    environment = HarborEnvironment(
        "images", [HarborTask(str(n), {}, {"test.sh": b""}, {"solve.sh": b""}, image="debian:12") for n in range(9)]
    )
    containers = Containers.find(folders)
    await containers.run(task())
    runner, episode = SandboxRunner(containers, {"images": environment}, ("127.0.0.1", 1)), new_episode_id()
    podman.write("exit", "137")
    with pytest.raises(SandboxFailed, match="the container was killed from outside, as podman says"):
        await runner.run_agent("images", "train-0", episode, "key")
    with pytest.raises(SandboxFailed, match="the container was killed from outside, as podman says"):
        await runner.verify("images", "train-0", episode, b"")
    podman.write("exit", "247")  # by what runs inside: the program that answers, and not its parent, the first process
    assert (await runner.run_agent("images", "train-0", episode, "key")).ending is Ending.AGENT_ERROR


async def test_an_image_without_python_is_refused(podman: StandIn, folders: BoxFolders) -> None:
    podman.write("stderr", 'exec: "python3": executable file not found in $PATH')
    with pytest.raises(RecordUnusable, match="debian:12 cannot be used: it has no python3"):
        await Containers.find(folders).run(task())


async def test_a_container_whose_caller_is_cancelled_is_removed(podman: StandIn, folders: BoxFolders) -> None:
    containers = Containers.find(folders)
    await containers.run(task())
    podman.write("waits", "for the end of its input")
    before = len(podman.calls("run"))
    running = asyncio.create_task(containers.run(task()))
    async with asyncio.timeout(60):
        while len(podman.calls("run")) == before:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    words = podman.calls("run")[-1]
    assert podman.calls("rm")[-1][-1] == words[words.index("--name") + 1]


def test_containers_of_dead_workers_are_swept_and_those_of_living_ones_stay(
    podman: StandIn, folders: BoxFolders
) -> None:
    containers = Containers.find(folders)
    with folders.new("living") as living:
        podman.write("names", f"{living.path.name}\nclawloop-box-gone-1")
        assert containers.sweep() == 1
        assert podman.calls("ps")[0][3] == f"label=clawloop.owner={folders.owner}"
        assert [words[-1] for words in podman.calls("rm")] == ["clawloop-box-gone-1"]
    assert containers.sweep() == 2


def test_each_user_sweeps_containers_of_their_own(
    podman: StandIn, folders: BoxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder for temporary files is one for all users, and a docker as well."""
    containers = Containers.find(folders)
    for user in (1001, 1002):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        containers.sweep()
    first, second = [words[3] for words in podman.calls("ps")]
    assert first != second


def test_containers_whose_folder_is_closed_to_this_user_stay(
    podman: StandIn, folders: BoxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def closed(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith("-closed/lock"):
            raise PermissionError(path)
        return opened(path, flags, mode)

    podman.write("names", "clawloop-box-gone\nclawloop-box-closed")
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", closed)
        assert Containers.find(folders).sweep() == 1
    assert [words[-1] for words in podman.calls("rm")] == ["clawloop-box-gone"]


def test_an_engine_that_does_not_answer_is_passed_over_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    podman = stand_in(tmp_path, monkeypatch, "podman")
    podman.write("info", "cannot connect")
    with pytest.raises(
        SetupError,
        match=r"^no containers on this machine: `podman info` fails \(cannot connect\), and there is no docker$",
    ):
        ContainerEngine.find()
    podman.write("info", "")
    assert ContainerEngine.find().is_podman


async def test_tasks_with_images_are_refused_in_one_line_where_there_are_no_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: BoxFolders
) -> None:
    host = Bubblewrap(Path("/bwrap"), folders, "python3")
    monkeypatch.setattr(Bubblewrap, "find", lambda _: host)
    monkeypatch.setenv("PATH", str(tmp_path))
    why = "^a task needs the image debian:12, and there are no containers on this machine: there is no podman, and"
    with pytest.raises(SetupError, match=why):
        SandboxesByImage.find(folders, ["debian:12"])
    without = SandboxesByImage.find(folders)
    with pytest.raises(RecordUnusable, match="needs the image debian:12, and this worker has no containers"):
        await without.run(task())


@pytest.mark.parametrize(("work", "used"), [("", "/app"), ("/", "/app"), ("/repo/", "/repo"), ("/usr/src/app", None)])
def test_a_working_folder_is_in_memory_and_hides_nothing_that_is_needed(work: str, used: str | None) -> None:
    if used is None:
        with pytest.raises(RecordUnusable, match="its working folder is /usr/src/app"):
            image_of("x", "sha256:abc", {"WorkingDir": work})
    else:
        assert image_of("x", "sha256:abc", {"WorkingDir": work, "Env": None}).work == used
