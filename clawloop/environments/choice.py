"""Which environments a worker runs, from its options."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from clawloop.core.errors import SetupError
from clawloop.environments.browser.chromium import Chromium
from clawloop.environments.browser.environment import BrowserEnvironment
from clawloop.environments.browser.kinds import KINDS, KINDS_BY_NAME, Kind
from clawloop.environments.harbor import HarborEnvironment
from clawloop.environments.reasoning_gym.environment import ReasoningGymEnvironment
from clawloop.environments.swe.environment import SweEnvironment
from clawloop.environments.task import CommandHarness, Environment
from clawloop.environments.terminal.environment import TerminalEnvironment
from clawloop.environments.tool_call.environment import ToolCallEnvironment
from clawloop.sandboxes.boxes import Sandboxes

# What a worker runs that is told nothing, and all. A browser takes memory; neither it nor reasoning-gym is everywhere.
DEFAULT_ENVIRONMENTS = (SweEnvironment.name, TerminalEnvironment.name, ToolCallEnvironment.name)
WITHOUT_BROWSER = (ReasoningGymEnvironment.name, *DEFAULT_ENVIRONMENTS)
ENVIRONMENTS = (BrowserEnvironment.name, *WITHOUT_BROWSER)


@dataclass(frozen=True, slots=True)
class BrowserOptions:
    """Options of the environment `browser`, see `Chromium.find` and `BrowserEnvironment`.

    Args:
        kinds: names of kinds of tasks; empty: all.
    """

    chromium: Path | None = None
    screenshots: bool = False
    kinds: Sequence[str] = ()


def choose(
    names: Sequence[str],
    tasks: Sequence[Path] = (),
    harness: CommandHarness | None = None,
    browser: BrowserOptions = BrowserOptions(),
    variables: Mapping[str, str] | None = None,
) -> dict[str, Environment]:
    """
    Args:
        variables: of this machine, which task directories may ask for.

    Raises:
        SetupError: no environment has this name, two have the same, a task directory is unusable, the environment
            takes no other harness, or its browser is missing.
    """
    chosen: dict[str, Environment] = {}
    for name in names:
        chosen[name] = _ours(name, harness, browser)
    for folder in tasks:
        environment = HarborEnvironment.read(folder, harness, variables)
        if environment.name in ENVIRONMENTS or environment.name in chosen:
            raise SetupError(
                f"--tasks {folder}: there is an environment {environment.name!r} already; rename the folder"
            )
        chosen[environment.name] = environment
    return chosen


def _ours(name: str, harness: CommandHarness | None, browser: BrowserOptions) -> Environment:
    if name == SweEnvironment.name:
        return SweEnvironment(harness)
    if name == TerminalEnvironment.name:
        return TerminalEnvironment(harness)
    if name not in ENVIRONMENTS:
        raise SetupError(f"there is no environment {name!r}: there is {', '.join(ENVIRONMENTS)}")
    if harness is not None:
        raise SetupError(f"--harness: {name} has its own; give --environment terminal or swe, or --tasks")
    if name == BrowserEnvironment.name:
        return BrowserEnvironment(Chromium.find(browser.chromium), browser.screenshots, _kinds(browser.kinds))
    if name == ReasoningGymEnvironment.name:
        return ReasoningGymEnvironment.find()
    if name == ToolCallEnvironment.name:
        return ToolCallEnvironment()
    raise AssertionError(f"{name!r} is in ENVIRONMENTS, and nothing here makes it")


def found_by_agent(environment: str, task_id: str) -> bytes | None:
    """A tar archive of what the task gives its agent in /work; None if the task is not made from its id alone.

    Raises:
        EpisodeUnusable: no task has this id.
    """
    if environment not in (SweEnvironment.name, TerminalEnvironment.name):
        return None
    return _ours(environment, None, BrowserOptions()).task(task_id).start


def _kinds(names: Sequence[str]) -> Sequence[Kind]:
    for name in names:
        if name not in KINDS_BY_NAME:
            raise SetupError(f"--kinds: browser has no {name!r}; it has {', '.join(KINDS_BY_NAME)}")
    return [KINDS_BY_NAME[name] for name in names] or KINDS


async def probe(environments: Iterable[Environment], sandboxes: Sandboxes) -> None:
    """Try what an environment needs besides a sandbox.

    Raises:
        SetupError: it does not work here.
    """
    for one in environments:
        if isinstance(one, BrowserEnvironment | ReasoningGymEnvironment):
            await one.probe(sandboxes)


def allowed_variables(names: Iterable[str]) -> dict[str, str]:
    """Variables of this process that task directories may ask for.

    Raises:
        SetupError: one is not set.
    """
    for name in names:
        if name not in os.environ:
            raise SetupError(f"--variable {name}: there is no such variable here")
    return {name: os.environ[name] for name in names}


def images_of(environments: Iterable[Environment]) -> set[str]:
    """Images of containers that tasks of these environments name."""
    return {image for one in environments if isinstance(one, HarborEnvironment) for image in one.images}


def gateway_address(url: str) -> tuple[str, int]:
    """Host and port of the gateway's URL.

    Raises:
        SetupError: it is no `http://HOST:PORT`.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = None
    if parts is None or parts.scheme != "http" or not host:
        raise SetupError(f"--gateway must be http://HOST:PORT, not {url!r}: sandboxes reach the gateway without TLS")
    return host, port or 80
