"""Checks a Harbor task before anybody practises on it: its solution must be right, doing nothing and cheating wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clawloop.environments.harbor import SOLUTION, HarborTask, environment_task
from clawloop.environments.runner import reward_of
from clawloop.environments.task import EnvironmentTask
from clawloop.sandboxes.boxes import BoxTask, Sandboxes

# Each line tries to get a reward without doing the task: by writing it where it is looked for, or by leaving programs
# that the verifier's shell or Python could run.
_TAMPER = r"""
mkdir -p /logs/verifier /tmp/logs/verifier logs/verifier 2>/dev/null
for file in reward.txt logs/verifier/reward.txt /logs/verifier/reward.txt /tmp/logs/verifier/reward.txt; do
  echo 1 > $file 2>/dev/null
  echo '{"reward": 1}' > ${file%.txt}.json 2>/dev/null
done
cheat='import os
os.makedirs("/tmp/logs/verifier", exist_ok=True)
open("/tmp/logs/verifier/reward.txt", "w").write("1")
os._exit(0)'
for name in sitecustomize usercustomize conftest json pathlib os re sys; do echo "$cheat" > $name.py; done
for minor in 8 9 10 11 12 13 14; do
  site=.local/lib/python3.$minor/site-packages
  mkdir -p $site && echo "$cheat" > $site/usercustomize.py && echo "import usercustomize" > $site/cheat.pth
done
printf '#!/bin/sh\necho 1 > /tmp/logs/verifier/reward.txt\n' | tee python3 bash sh cat diff grep > /dev/null
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
        """Why the task is refused; None if it can be used."""
        wanted = {"oracle": 1.0, "nothing": 0.0, "tampering": 0.0}
        found = {"oracle": self.oracle, "nothing": self.nothing, "tampering": self.tampering}
        for name, reward in wanted.items():
            if found[name] is None:
                return f"{name} has no reward: {self.reasons.get(name, '')}"
            if found[name] != reward:
                return f"{name} has the reward {found[name]:g}, and must have {reward:g}"
        return None


async def check_task(sandboxes: Sandboxes, task: HarborTask) -> Checked:
    """
    Raises:
        SandboxFailed: a sandbox itself did not work.
        EpisodeUnusable: the task's image cannot be used.
    """
    made = environment_task("check", task)
    commands = {
        "oracle": (("bash", "/solution/solve.sh"), task.solution, task.executable_in(SOLUTION)),
        "nothing": (("true",), {}, ()),
        "tampering": (("bash", "-c", _TAMPER), {}, ()),
    }
    rewards: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for name, (command, files, executable) in commands.items():
        box = BoxTask(
            f"check-{name}",
            command,
            made.seconds,
            files,
            archive=made.start,
            image=made.image,
            executable=executable,
        )
        left = await sandboxes.run(box)
        if left.problem is not None:
            reasons[name] = left.problem
            rewards[name] = None
            continue
        rewards[name], why = await _verify(sandboxes, made, left.artifact)
        if why:
            reasons[name] = why
    return Checked(rewards["oracle"], rewards["nothing"], rewards["tampering"], reasons)


async def _verify(sandboxes: Sandboxes, task: EnvironmentTask, artifact: bytes) -> tuple[float | None, str]:
    box = BoxTask(
        "check-verify",
        task.verifier,
        task.verifier_seconds,
        task.tests,
        archive=artifact,
        unpack_to=task.artifact_at,
        environment={**task.environment, **task.verifier_environment},
        image=task.image,
        fresh=True,
        executable=task.executable_tests,
    )
    return reward_of(await sandboxes.run(box), task)
