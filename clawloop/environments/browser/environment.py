"""The environment `browser`: small pages in headless Chromium, which the agent reads as text and acts on by tools."""

from __future__ import annotations

import importlib.resources
import json
import random
from collections.abc import Sequence
from typing import Any

from clawloop.core.episodes.kinds import ChosenKind
from clawloop.core.errors import EpisodeUnusable, SandboxFailed, SetupError
from clawloop.environments.browser.chromium import PLAYWRIGHT, REMEDY, Chromium
from clawloop.environments.browser.kinds import FIRST_LEVEL, KINDS, KINDS_BY_NAME, SENT, Kind, Scenario
from clawloop.environments.task import HARNESS, EnvironmentTask, SessionLoop, Split, parse_chosen_task_id, split_of
from clawloop.sandboxes.boxes import BoxTask, Limits, Sandboxes

# The environment ------------------------------------------------------------------------------------------------------
# The environment `browser`: small pages in headless Chromium, which the agent reads as text and acts on by tools.

_MIB = 1024 * 1024
# Nine processes, whose threads count each. With 512 MiB it drew nothing on two cores, and more cores have more threads.
LIMITS = Limits(memory_bytes=2048 * _MIB, processes=512, disk_bytes=256 * _MIB, open_files=1024, reserving=True)
# A start takes seconds, on a machine that does nothing else.
_PROBE_SECONDS = 120.0
_INSIDE = importlib.resources.files("clawloop.environments.browser") / "inside"


def _tool(name: str, description: str, **arguments: dict[str, Any]) -> dict[str, Any]:
    needed = [argument for argument, schema in arguments.items() if schema["type"] == "string"]
    parameters = {"type": "object", "properties": arguments, "required": needed}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TEXT: dict[str, Any] = {"type": "string"}
_REF: dict[str, Any] = {"type": "string", "description": "The element's ref in the newest snapshot, such as e5."}
TOOLS = (
    _tool("click", "Click an element; returns the page afterwards.", ref=_REF),
    _tool(
        "type",
        "Replace the text of a field; returns the page afterwards.",
        ref=_REF,
        text=_TEXT,
        enter={"type": "boolean", "description": "Press Enter afterwards."},
    ),
    _tool("select", "Choose an option of a list; returns the page afterwards.", ref=_REF, option=_TEXT),
    _tool(
        "scroll",
        "Scroll an element; returns the page afterwards.",
        ref=_REF,
        direction={"type": "string", "enum": ["up", "down"]},
    ),
    _tool("done", "Say that the task is done."),
)
AGENT = SessionLoop(tools=TOOLS, session=(f"{PLAYWRIGHT}/node", "/task/session.cjs"), turns=20, max_tokens=512)


class BrowserEnvironment:
    """Satisfies `clawloop.environments.task.Environment`.

    Args:
        screenshots: the model gets a picture with each snapshot; turns with pictures are recorded, and not trained.
        kinds: of tasks, which come in turn unless a curriculum chooses among all kinds.
    """

    name = "browser"

    def __init__(self, chromium: Chromium, screenshots: bool = False, kinds: Sequence[Kind] = KINDS) -> None:
        self._chromium = chromium
        self._screenshots = screenshots
        self._kinds = kinds

    def task(self, task_id: str) -> EnvironmentTask:
        split, number, chosen = parse_chosen_task_id(self.name, task_id)
        if chosen is not None and KINDS_BY_NAME[chosen.kind] not in self._kinds:
            raise EpisodeUnusable(
                f"{task_id!r} is of a kind that this worker's --kinds leaves out: start it without --kinds, or rollouts"
                " without --curriculum"
            )
        return self.as_task(task_id, generated_task(split, number, self._kinds, chosen))

    def as_task(self, task_id: str, made: Scenario) -> EnvironmentTask:
        config = {
            **self._chromium.config,
            "pages": {path: page.html for path, page in made.pages.items()},
            "sent": SENT,
            "pictures": self._screenshots,
        }
        return EnvironmentTask(
            id=task_id,
            files={
                **AGENT.files(made.instruction),
                "session.cjs": (_INSIDE / "session.cjs").read_bytes(),
                "browser.json": json.dumps(config).encode(),
            },
            harness=HARNESS,
            tests={
                "expected.json": json.dumps(expected(made)).encode(),
                "check.py": (_INSIDE / "check.py").read_bytes(),
            },
            verifier=("python3", "-I", "/task/check.py"),
            # Twenty turns take minutes; the rest is for an engine that restarts meanwhile.
            seconds=900.0,
            folders=self._chromium.folders,
            limits=LIMITS,
        )

    async def probe(self, sandboxes: Sandboxes) -> None:
        """
        Raises:
            SetupError: Chromium draws no page in a sandbox here.
        """
        task = self.task("train-0")
        box = BoxTask("probe-browser", AGENT.session, _PROBE_SECONDS, task.files, task.folders, limits=LIMITS)
        try:
            done = await sandboxes.run(box)
        except SandboxFailed as error:
            raise SetupError(
                f"{error}: everybody must be able to read the folders of Chromium and Playwright"
            ) from None
        if done.exit_code != 0:
            why = " ".join(done.output.decode(errors="replace").split())[:300]
            raise SetupError(
                f"{self._chromium.path} draws no page in a sandbox: {why or 'it does not answer'}; {REMEDY}"
            )


def generated_task(
    split: Split, number: int, kinds: Sequence[Kind] = KINDS, chosen: ChosenKind | None = None
) -> Scenario:
    """The `number`-th task of a split: the kinds in turn, or the chosen one, each with names and values of its own."""
    kind = kinds[number % len(kinds)] if chosen is None else KINDS_BY_NAME[chosen.kind]
    level = FIRST_LEVEL if chosen is None else chosen.level
    drawn = random.Random(f"browser {split} {number}")
    while True:
        task = kind(drawn, level)
        # Without style and script: a page that looks different is the same task.
        if split_of("\n".join([task.instruction, *(page.body for page in task.pages.values())])) is split:
            return task


def expected(task: Scenario) -> dict[str, Any]:
    """The requests that the session must have recorded: exactly one right post, or none and the right page."""
    posts = [] if task.fields is None else [{"path": task.at, "fields": [list(pair) for pair in task.fields]}]
    return {"sent": posts, "at": task.at}
