"""Checks a task before anybody practises on it: its solution must be right, doing nothing and cheating wrong."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clawloop.core.errors import TaskUnusable
from clawloop.environments.playing import Actor, play
from clawloop.environments.task import EnvironmentTask
from clawloop.sandboxes.boxes import Sandboxes

log = logging.getLogger(__name__)

# A check without a reward may have met a slow or full machine: it is made again after so many seconds, and no more
# often, however many episodes ask. The problem that the last one finds stands until the worker restarts.
AGAIN_SECONDS = (60.0, 600.0)
_WANTED = {"oracle": 1.0, "nothing": 0.0, "tampering": 0.0}

# Each line tries to get a reward without doing the task: by writing it where it is looked for, or by leaving programs
# that the verifier's shell or Python could run.
_TAMPER = r"""
mkdir -p /logs/verifier logs/verifier 2>/dev/null
for file in reward.txt logs/verifier/reward.txt /logs/verifier/reward.txt; do
  echo 1 > $file 2>/dev/null
  echo '{"reward": 1}' > ${file%.txt}.json 2>/dev/null
done
cheat='import os
os.makedirs("/logs/verifier", exist_ok=True)
open("/logs/verifier/reward.txt", "w").write("1")
os._exit(0)'
for name in sitecustomize usercustomize conftest json pathlib os re sys; do echo "$cheat" > $name.py; done
for minor in 8 9 10 11 12 13 14; do
  site=.local/lib/python3.$minor/site-packages
  mkdir -p $site && echo "$cheat" > $site/usercustomize.py && echo "import usercustomize" > $site/cheat.pth
done
printf '#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n' | tee python3 bash sh cat diff grep > /dev/null
chmod +x python3 bash sh cat diff grep
cp python3 .bashrc; cp python3 .profile; cp python3 .bash_profile
mkdir -p tests && cp bash tests/test.sh && cp bash test.sh
exit 0
"""


@dataclass(frozen=True, slots=True)
class Checked:
    """Rewards of three attempts; None with why there is none.

    Args:
        oracle: of the task's own solution; must be 1.
        nothing: of an agent that does nothing; tampering: of one that cheats; both must be 0.
        reasons: of attempts without a reward, by their names.
    """

    oracle: float | None
    nothing: float | None
    tampering: float | None
    reasons: Mapping[str, str]

    @property
    def problem(self) -> str | None:
        """The reason that the task is refused; None if it can be used."""
        for name, reward in self._found.items():
            if reward is None:
                return f"{name} has no reward: {self.reasons.get(name, '')}"
            if reward != _WANTED[name]:
                return f"{name} has the reward {reward:g}, and must have {_WANTED[name]:g}"
        return None

    @property
    def may_pass(self) -> bool:
        """True if another check may pass: a reward is missing, and no reward is wrong."""
        wrong = any(reward is not None and reward != _WANTED[name] for name, reward in self._found.items())
        return self.problem is not None and not wrong

    @property
    def _found(self) -> Mapping[str, float | None]:
        return {"oracle": self.oracle, "nothing": self.nothing, "tampering": self.tampering}


async def check_task(sandboxes: Sandboxes, task: EnvironmentTask) -> Checked:
    """
    Raises:
        SandboxFailed: a sandbox itself did not work.
        EpisodeUnusable: the task's image cannot be used.
    """
    actors: dict[str, Callable[[EnvironmentTask], Actor]] = {
        "oracle": _solving,
        "nothing": _idle,
        "tampering": _cheating,
    }
    rewards: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for name, actor_of in actors.items():
        played = await play(sandboxes, f"check-{name}", task, actor_of)
        problems = [result.problem for _, result in played.acted if result.problem is not None]
        rewards[name] = None if problems else played.reward
        if rewards[name] is None:
            reasons[name] = problems[0] if problems else played.reason
    return Checked(rewards["oracle"], rewards["nothing"], rewards["tampering"], reasons)


def _solving(step: EnvironmentTask) -> Actor:
    assert step.solution is not None
    solution = step.solution
    return Actor(solution.command, solution.files, solution.executable, environment=solution.environment)


def _idle(_: EnvironmentTask) -> Actor:
    return Actor(("true",))


def _cheating(_: EnvironmentTask) -> Actor:
    return Actor(("bash", "-c", _TAMPER))


@dataclass
class _Known:
    """
    Args:
        again_at: when the task is checked again; None: never.
    """

    problem: str | None
    checks: int
    again_at: float | None


class CheckedTasks:
    """Checks each task before it is played, once unless a reward is missing, however many episodes wait for it.

    Args:
        sandboxes: as the episodes have them.
    """

    def __init__(self, sandboxes: Sandboxes, clock: Callable[[], float] = time.monotonic) -> None:
        self._sandboxes = sandboxes
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def require_usable(self, task: EnvironmentTask) -> None:
        """
        Raises:
            TaskUnusable: its rewards are not 1, 0 and 0.
            SandboxFailed: a sandbox itself did not work; the next call checks it again.
        """
        if task.digest is None:
            return
        async with self._locks[task.digest]:
            known = self._known.get(task.digest)
            if known is None or (known.again_at is not None and known.again_at <= self._clock()):
                known = self._known[task.digest] = await self._check(task, 0 if known is None else known.checks)
        if known.problem is not None:
            raise TaskUnusable(f"the task is not played: {known.problem}; see `clawloop environment check`")

    async def _check(self, task: EnvironmentTask, before: int) -> _Known:
        checked = await check_task(self._sandboxes, task)
        again_at = None
        if checked.may_pass and before < len(AGAIN_SECONDS):
            again_at = self._clock() + AGAIN_SECONDS[before]
        if checked.problem is not None:
            log.warning("task is not played", extra={"task": task.id, "why": checked.problem})
        return _Known(checked.problem, before + 1, again_at)
