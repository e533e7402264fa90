"""`clawloop-environment`: the worker of environments in a Python environment of its own, without a database.

The distribution of this name has this program, and what it needs of Clawloop; it reads its variables itself.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clawloop.app.processes.remote_environment import RemoteWorker, run_remote_worker
from clawloop.core.contracts.episodes import RewardRange
from clawloop.core.episodes.kinds import LONGEST_SECONDS
from clawloop.core.errors import ClawloopError, SetupError
from clawloop.core.telemetry.logs import configure_logging
from clawloop.environments.choice import ENVIRONMENTS, WITHOUT_BROWSER, allowed_variables, choose
from clawloop.environments.harbor_toml import AGENT_SECONDS
from clawloop.environments.task import CommandHarness
from clawloop.environments.verifiers.loading import VerifiersOptions

PROGRAM = "clawloop-environment"
_VARIABLES = """variables:
  CLAWLOOP_WORKER_KEY  a key with the scope `worker`: clawloop key create --scope worker
  TEMPORAL_ADDRESS     Temporal's host:port, unless --temporal is given
"""


def main() -> None:
    """Run the program; errors are one line."""
    try:
        worker = worker_of(_parser().parse_args(), os.environ)
        configure_logging(secrets=[worker.key])
        # Its log has two lines for each rollout, and may quote a task.
        logging.getLogger("verifiers").setLevel(logging.WARNING)
        asyncio.run(run_remote_worker(worker))
    except ClawloopError as error:
        sys.exit(f"{PROGRAM}: {error}")


def worker_of(options: argparse.Namespace, variables: Mapping[str, str]) -> RemoteWorker:
    """
    Raises:
        SetupError: an option or a variable is missing or wrong.
    """
    key = variables.get("CLAWLOOP_WORKER_KEY", "").strip()
    if not key:
        raise SetupError("no key: set CLAWLOOP_WORKER_KEY to one of `clawloop key create --scope worker`")
    temporal = options.temporal or variables.get("TEMPORAL_ADDRESS", "").strip()
    if not temporal:
        raise SetupError("no Temporal: set TEMPORAL_ADDRESS, or give --temporal")
    if not options.gateway.startswith(("http://", "https://")):
        raise SetupError(f"--gateway must be http://HOST:PORT or https://HOST, not {options.gateway!r}")
    verifiers = _verifiers(options)
    if not (verifiers or options.environment or options.tasks):
        raise SetupError("nothing to run: give --verifiers ID, --tasks DIR or --environment NAME")
    harness = None if options.harness is None else CommandHarness(options.harness, options.harness_folder)
    sandboxed = choose(options.environment, options.tasks, harness, variables=allowed_variables(options.variable))
    if shared := set(verifiers) & (set(sandboxed) | set(ENVIRONMENTS)):
        raise SetupError(f"there is an environment {min(shared)!r} already: give another --name")
    return RemoteWorker(
        temporal=temporal,
        gateway=options.gateway,
        key=key,
        episodes=options.episodes,
        health=(options.health_host, options.health_port),
        sandboxed=sandboxed,
        verifiers=verifiers,
    )


def _verifiers(options: argparse.Namespace) -> dict[str, VerifiersOptions]:
    if options.verifiers is None:
        return {}
    if not 0 < options.seconds <= LONGEST_SECONDS:
        raise SetupError(f"--seconds must be above 0 and at most {LONGEST_SECONDS:g}, not {options.seconds:g}")
    block = {} if options.verifiers_config is None else _env_table(options.verifiers_config)
    # A hub's id is OWNER/NAME@VERSION.
    name = options.name or options.verifiers.rsplit("/", 1)[-1].split("@", 1)[0]
    try:
        reward_range = RewardRange(*options.reward_range)
    except ValueError as error:
        raise SetupError(f"--reward-range: {error}") from None
    return {name: VerifiersOptions(options.verifiers, block, options.seconds, options.local_commands, reward_range)}


def _env_table(path: Path) -> Mapping[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"--verifiers-config {path} cannot be read: {error}") from error
    table = content.get("env")
    if not isinstance(table, dict):
        raise SetupError(f"--verifiers-config {path} has no table [env]")
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Run episodes of environments on this machine, for a Clawloop elsewhere.",
        epilog=_VARIABLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--gateway", default="http://127.0.0.1:30000", metavar="URL", help="the gateway's address, for agents")
    add("--temporal", metavar="HOST:PORT", help="default: TEMPORAL_ADDRESS")
    add("--verifiers", metavar="ID", help="an installed environment of verifiers 0.4, as `vf-eval` names it")
    add("--verifiers-config", type=Path, metavar="FILE", help="a TOML file whose table [env] verifiers understands")
    add("--name", help="name of the environment of verifiers in rollouts; default: its id")
    add(
        "--seconds",
        type=float,
        default=AGENT_SECONDS,
        help="time limit of an agent of verifiers, unless its table has one",
    )
    add(
        "--reward-range",
        type=float,
        nargs=2,
        default=(0.0, 1.0),
        metavar=("LOW", "HIGH"),
        help="the lowest and the highest reward of the environment of verifiers (0 1)",
    )
    add("--local-commands", action="store_true", help="let the model's commands run as this worker, in its container")
    add("--tasks", type=Path, action="append", default=[], metavar="DIR", help="Harbor task directories; repeatable")
    add(
        "--environment",
        action="append",
        default=[],
        choices=WITHOUT_BROWSER,
        help="one of Clawloop's own; repeatable",
    )
    add("--harness", metavar="COMMAND", help="plays the agent of --tasks; the task: /task/prompt.txt")
    add("--harness-folder", type=Path, metavar="DIR", help="what the harness needs, at /agent in the sandbox")
    add(
        "--variable",
        action="append",
        default=[],
        metavar="NAME",
        help="that --tasks may ask for by ${NAME}; repeatable",
    )
    add("--episodes", type=int, default=8, help="at a time, for each environment (8)")
    add("--health-port", type=int, default=0, help="of /healthz, /readyz and /metrics; 0 serves none")
    add("--health-host", default="127.0.0.1", help="its address")
    return parser


if __name__ == "__main__":
    main()
