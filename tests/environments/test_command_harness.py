"""Commands that play the agent instead of our own loop."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawloop.core.contracts.episodes import Ending
from clawloop.core.errors import SetupError
from clawloop.core.ids import new_episode_id
from clawloop.environments.choice import choose
from clawloop.environments.runner import SandboxRunner
from clawloop.environments.swe.environment import SweEnvironment, generated_repository
from clawloop.environments.task import CommandHarness, Split
from clawloop.environments.terminal.environment import TerminalEnvironment
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders
from tests.environments.test_terminal import write_task


async def play(harness: CommandHarness) -> tuple[Ending, float | None]:
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    runner = SandboxRunner(sandboxes, {"swe": SweEnvironment(harness)}, ("127.0.0.1", 9))
    episode = new_episode_id()
    run = await runner.run_agent("swe", "train-0", episode, "key")
    return run.ending, (await runner.verify("swe", "train-0", episode, run.artifact))[0]


@pytest.mark.slow
async def test_a_command_reads_the_task_and_its_own_folder_and_may_solve_it(shared: Path) -> None:
    solution = generated_repository(Split.TRAIN, 0).solution["solve.sh"]
    (shared / "solve.sh").write_bytes(solution)
    reads = 'grep -q "is wrong" /task/prompt.txt && test "$OPENAI_API_KEY" = key && bash /agent/solve.sh'
    assert await play(CommandHarness(reads, shared)) == (Ending.COMPLETED, 1.0)
    assert await play(CommandHarness("touch /agent/new", shared)) == (Ending.AGENT_ERROR, 0.0)
    assert await play(CommandHarness("exit 3")) == (Ending.TRUNCATED_TURNS, 0.0)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that the users of sandboxes can read; pytest's own are its user's alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_it_plays_all_tasks_of_the_worker_that_have_no_agent_of_their_own(tmp_path: Path) -> None:
    write_task(tmp_path / "files" / "task", generated_repository(Split.TRAIN, 0))
    harness = CommandHarness("true", tmp_path)
    chosen = choose(["terminal", "swe"], [tmp_path / "files"], harness)
    for environment in chosen.values():
        task = environment.task("train-0")
        assert (task.harness, task.folders) == (("bash", "-c", "true"), {"/agent": tmp_path.resolve()})
    assert TerminalEnvironment().task("train-0").folders == {}
    with pytest.raises(SetupError, match="tool-call has its own"):
        choose(["tool-call"], [], harness)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"--harness-folder .* is no folder"):
        CommandHarness("true", tmp_path / "none")
