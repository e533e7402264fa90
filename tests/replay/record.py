"""Records the histories that test_replay.py replays: `python -m tests.replay.record [PATH ...]`.

Each is one path through a workflow, run on Temporal's development server with scripted activities: a function of
`session_paths.py`, `training_paths.py`, `engine_paths.py`, `rollout_paths.py` or `sweep_paths.py`, whose docstring says
what the path takes. Together they take each branch of each workflow. CONTRIBUTING.md says when they are recorded anew.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowHistory
from temporalio.testing import WorkflowEnvironment

from clawloop.app.temporal.plugin import connect
from clawloop.app.temporal.server import register_search_attributes
from tests.replay import engine_paths, rollout_paths, session_paths, sweep_paths, training_paths

HISTORIES = Path(__file__).with_name("histories")

PATHS: dict[str, Callable[[Client], Awaitable[WorkflowHistory]]] = {
    **{path.__name__: partial(session_paths.history, path=path) for path in session_paths.PATHS},
    **{path.__name__: partial(training_paths.history, path=path) for path in training_paths.PATHS},
    **{path.__name__: partial(engine_paths.history, path=path) for path in engine_paths.PATHS},
    **{path.__name__: partial(rollout_paths.history, path=path) for path in rollout_paths.PATHS},
    **{path.__name__: path for path in sweep_paths.PATHS},
}
"""Records a history, by the name of its path."""


async def record(names: Sequence[str]) -> None:
    program = Path(sys.executable).with_name("temporal")
    async with await WorkflowEnvironment.start_local(dev_server_existing_path=str(program)) as environment:
        client = await connect(environment.client.service_client.config.target_host)
        await register_search_attributes(client)
        for name in names:
            keep(name, await PATHS[name](client))


def keep(name: str, history: WorkflowHistory) -> None:
    """Save a history for test_replay.py."""
    kept = _without(json.loads(history.to_json()), ("stackTrace", "identity", "workerControlTaskQueue"))
    events = ",\n".join(json.dumps(event) for event in kept["events"])  # one a line, to compare two recordings
    (HISTORIES / f"{name}.json").write_text(f'{{"events": [\n{events}\n]}}\n')


def _without(value: Any, names: tuple[str, ...]) -> Any:
    """A history without what tells of the machine it was recorded on."""
    if isinstance(value, dict):
        if "normalName" in value:  # a worker's own queue is named after its process
            value = value | {"name": value["normalName"]}
        return {name: _without(inner, names) for name, inner in value.items() if name not in names}
    return [_without(inner, names) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    HISTORIES.mkdir(exist_ok=True)
    asyncio.run(record(sys.argv[1:] or list(PATHS)))
