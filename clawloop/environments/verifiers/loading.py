"""Loads an environment of verifiers, unchanged, by its own loaders; what differs is where it finds its model.

verifiers is in the worker's own Python environment, not in Clawloop's. This knows version 0.4.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawloop.core.contracts.episodes import UNIT_RANGE, RewardRange
from clawloop.core.episodes.kinds import LONGEST_SECONDS
from clawloop.core.errors import SetupError
from clawloop.environments.harbor_toml import AGENT_SECONDS
from clawloop.environments.task import Split, split_of

# Tasks of a set that never ends.
MOST_TASKS = 10_000
# Time limit of each stage except the agent's. verifiers has no limits of its own; an episode that hangs would hold its
# place.
_STAGE_SECONDS = 600.0
# Task fields for its index and its local folder (set `harbor`); left out of the hash, as they differ between machines.
_PLACES = {"idx", "task_dir"}
_CONTAINER_PROGRAMS = {"docker": "docker", "podman": "podman"}
_PROBE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class VerifiersOptions:
    """
    Args:
        taskset: the id by which verifiers finds the installed package.
        block: the `[env]` table of a configuration file of verifiers.
        seconds: the agent's time limit, unless the table has one.
        local_commands: commands of the model may run as this worker.
        reward_range: of the environment's weighted reward.
    """

    taskset: str
    block: Mapping[str, Any]
    seconds: float = AGENT_SECONDS
    local_commands: bool = False
    reward_range: RewardRange = UNIT_RANGE


@dataclass(frozen=True, slots=True)
class LoadedEnvironment:
    """
    Args:
        env: a `verifiers.v1.Env`.
        role: the agent that the policy plays.
        tasks: `verifiers.v1.Task`s.
        seconds: after which an episode hangs.
        reward_range: see `VerifiersOptions`.
    """

    env: Any
    role: str
    tasks: Mapping[Split, Sequence[Any]]
    seconds: float
    reward_range: RewardRange


def load(options: VerifiersOptions) -> LoadedEnvironment:
    """
    Raises:
        SetupError: verifiers or the environment is not installed, its table is wrong, or it cannot be played here.
    """
    vf = _verifiers()
    try:
        config = vf.resolve_env_config(_completed(vf, options))
        env = vf.load_environment(config)
        role = _policys_role(vf, config)
        _require_safe(vf, config, role, options)
        tasks = split_tasks(itertools.islice(env.taskset, MOST_TASKS))
    except (ImportError, AttributeError, TypeError, ValueError, OSError, RuntimeError) as error:
        raise SetupError(f"--verifiers {options.taskset}: {' '.join(str(error).split())[:500]}") from error
    agent = getattr(config, role)
    require_images(agent.runtime.type, tasks[Split.TRAIN], options.taskset)
    if not tasks[Split.TRAIN]:
        raise SetupError(
            f"--verifiers {options.taskset}: all tasks fell into the held-out share, which a hash chooses; add tasks"
        )
    seconds = seconds_in_all(agent.timeout, role, options.taskset)
    return LoadedEnvironment(env, role, tasks, seconds, options.reward_range)


def split_tasks(tasks: Iterable[Any]) -> dict[Split, list[Any]]:
    """Tasks by a hash of what they hold but their place, so that no task is ever in both, on whichever machine."""
    found: dict[Split, list[Any]] = {split: [] for split in Split}
    for task in tasks:
        content = task.data.model_dump(mode="json", exclude=_PLACES, exclude_none=True)
        found[split_of(json.dumps(content, sort_keys=True))].append(task)
    return found


def _verifiers() -> Any:
    try:
        import verifiers.v1
    except ImportError as error:
        raise SetupError(
            f"no verifiers 0.4 in this Python environment ({error}): pip install 'verifiers>=0.4,<0.5'"
        ) from error
    return verifiers.v1


def _completed(vf: Any, options: VerifiersOptions) -> dict[str, Any]:
    """The table with the task set, and for each agent limits, and a runtime on this machine if it names none."""
    block = dict(options.block)
    block["taskset"] = {**_table(block, "taskset"), "id": options.taskset}
    fields = vf.env_config_type(options.taskset, block.get("id") or "").model_fields
    for name, field in fields.items():
        if isinstance(field.default, vf.AgentConfig):
            agent = dict(_table(block, name))
            if isinstance(field.default.runtime, vf.PrimeConfig):
                # Without a name it would be a cloud, which asks for an account.
                agent.setdefault("runtime", {"type": "subprocess"})
            limits = dict.fromkeys(("setup", "finalize", "scoring"), _STAGE_SECONDS) | {"rollout": options.seconds}
            agent["timeout"] = limits | _table(agent, "timeout")
            block[name] = agent
    return block


def _table(block: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = block.get(name) or {}
    if not isinstance(table, dict):
        raise SetupError(f"--verifiers-config: `{name}` must be a table")
    return table


def _policys_role(vf: Any, config: Any) -> str:
    """The one agent without a model of its own."""
    agents = {name: value for name, value in config if isinstance(value, vf.AgentConfig)}
    ours = [name for name, agent in agents.items() if agent.client is None]
    if len(ours) != 1:
        raise SetupError(
            f"--verifiers {config.taskset.id}: its agents are {', '.join(agents)}, and the policy plays one of them:"
            " give all others a `client` and a `model` of their own in --verifiers-config"
        )
    return str(ours[0])


def _require_safe(vf: Any, config: Any, role: str, options: VerifiersOptions) -> None:
    harness = config.agent_harnesses()[role]
    local = isinstance(getattr(config, role).runtime, vf.SubprocessConfig)
    if local and vf.load_harness(harness).EXECUTES_CODE and not options.local_commands:
        raise SetupError(
            f"--verifiers {options.taskset}: its harness {harness.id!r} runs commands of the model, which the runtime"
            " `subprocess` would run as this worker: name another runtime in --verifiers-config, or start the worker in"
            " a container of its own with --local-commands"
        )


def require_images(runtime: str, tasks: Sequence[Any], taskset: str) -> None:
    """See that what makes containers answers, and that there is such a thing where tasks name images.

    Raises:
        SetupError: it does not, or there is none.
    """
    if runtime == "subprocess" and any(task.data.image for task in tasks):
        raise SetupError(
            f"--verifiers {taskset}: its tasks name images, and the runtime `subprocess` has none: name docker, podman"
            " or another in --verifiers-config"
        )
    if (program := _CONTAINER_PROGRAMS.get(runtime)) is None:
        return
    found = shutil.which(program)
    if found is None:
        raise SetupError(f"--verifiers {taskset}: the runtime is {runtime}, and there is no {program} on this machine")
    try:
        probe = subprocess.run([found, "info"], capture_output=True, timeout=_PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        probe = None
    if probe is None or probe.returncode != 0:
        raise SetupError(f"--verifiers {taskset}: {program} on this machine reaches no daemon: `{program} info` fails")


def seconds_in_all(timeout: Any, role: str, taskset: str) -> float:
    """Seconds that no episode reaches: the limits of all its stages, and a minute.

    Raises:
        SetupError: that is more than an episode may take.
    """
    stages = (timeout.setup, timeout.rollout, timeout.finalize, timeout.scoring)
    seconds = float(sum(_STAGE_SECONDS if stage is None else stage for stage in stages))
    if not seconds <= LONGEST_SECONDS:
        raise SetupError(
            f"--verifiers {taskset}: the stages setup, rollout, finalize and scoring may take {seconds:g} s together,"
            f" and an episode {LONGEST_SECONDS:g}: lower `{role}.timeout` in --verifiers-config, or --seconds"
        )
    return 60.0 + seconds
