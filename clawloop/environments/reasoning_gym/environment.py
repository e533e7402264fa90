"""The environment `reasoning-gym`: puzzles of the package of that name, with the Python tool of `tool-call`.

Of its generators those are taken (`clawloop.core.episodes.kinds`) that give the same task in every process, and whose
score compares text: other scores run what the model wrote, e.g. by sympy, and could be told what to say.
`number_sequence` is not among them: one of some hundred of its tasks squares numbers without a bound, and is never made
(0.1.25).
"""

from __future__ import annotations

import importlib
import importlib.resources
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clawloop.core.episodes.kinds import KINDS, ChosenKind
from clawloop.core.errors import SetupError
from clawloop.environments.task import HARNESS, EnvironmentTask, parse_chosen_task_id, split_of
from clawloop.environments.tool_call.environment import AGENT
from clawloop.sandboxes.boxes import BoxTask, Sandboxes

GENERATORS = tuple(sorted(KINDS["reasoning-gym"]))
_ASKED = "\n\nWhen you know the answer, reply with it alone between <answer> and </answer>."
_VERIFIER = importlib.resources.files("clawloop.environments.reasoning_gym") / "inside" / "verify.py"
_PACKAGES = "/packages"
_PROBE_SECONDS = 60.0


class ReasoningGymEnvironment:
    """Satisfies `clawloop.environments.task.Environment`.

    Args:
        library: the package.
    """

    name = "reasoning-gym"

    def __init__(self, library: Any) -> None:
        self._library = library
        self._packages = Path(library.__file__).resolve().parents[1]

    @classmethod
    def find(cls) -> ReasoningGymEnvironment:
        """
        Raises:
            SetupError: the package is not installed.
        """
        try:
            return cls(importlib.import_module("reasoning_gym"))
        except ImportError as error:
            raise SetupError(
                f"--environment {cls.name}: no reasoning-gym in this Python environment ({error}): pip install"
                " 'reasoning-gym>=0.1.25,<0.2'"
            ) from error

    def task(self, task_id: str) -> EnvironmentTask:
        split, number, chosen = parse_chosen_task_id(self.name, task_id)
        drawn = random.Random(f"{split}-{number}")
        options = {} if chosen is None else self._options(chosen)
        while True:
            generator, seed = drawn.choice(GENERATORS), drawn.randrange(2**31)
            if chosen is not None:
                generator = chosen.kind
            entry = self._library.create_dataset(generator, **options, seed=seed, size=1)[0]
            if split_of(entry["question"]) is split:
                return self._as_task(task_id, generator, entry)

    def _options(self, chosen: ChosenKind) -> dict[str, Any]:
        """Options of a generator at a level; none where the package has no curriculum for it."""
        factory = self._library.factory
        if not factory.has_curriculum(chosen.kind):
            return {}
        curriculum = factory.create_curriculum(chosen.kind)
        for name, attribute in curriculum.attributes.items():
            curriculum.set_attr_level(name, min(chosen.level, len(attribute.levels)) - 1)
        made = asdict(curriculum.generate_configuration())
        return {name: value for name, value in made.items() if name not in ("seed", "size")}

    def _as_task(self, task_id: str, generator: str, entry: dict[str, Any]) -> EnvironmentTask:
        right = {"generator": generator, "entry": {"question": entry["question"], "answer": entry["answer"]}}
        return EnvironmentTask(
            id=task_id,
            files=AGENT.files(entry["question"] + _ASKED),
            harness=HARNESS,
            tests={"right.json": json.dumps(right).encode(), "verify.py": _VERIFIER.read_bytes()},
            verifier=("python3", "-I", "/task/verify.py"),
            seconds=600.0,  # as of `tool-call`
            verifier_folders={_PACKAGES: self._packages},
        )

    async def probe(self, sandboxes: Sandboxes) -> None:
        """Score an answer in a sandbox, whose Python is that of /usr.

        Raises:
            SetupError: the package cannot be used there.
        """
        task = self.task("train-0")
        box = BoxTask("probe", task.verifier, _PROBE_SECONDS, task.tests, folders=task.verifier_folders)
        tried = await sandboxes.run(box)
        if tried.exit_code != 0:
            why = " ".join(tried.output.decode(errors="replace").split())[-200:]
            raise SetupError(
                f"--environment {self.name}: the package in {self._packages} cannot be used in a sandbox ({why}):"
                " install it for the Python of /usr, where every user can read it"
            )
