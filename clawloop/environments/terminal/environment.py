"""The environment `terminal`: a dozen kinds of tasks with files and text, as Harbor task directories."""

from __future__ import annotations

import importlib.resources
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clawloop.core.episodes.kinds import ChosenKind
from clawloop.environments.harbor import HarborTask, environment_task
from clawloop.environments.task import CommandHarness, EnvironmentTask, Split, parse_chosen_task_id

# Kinds ----------------------------------------------------------------------------------------------------------------
# The kinds of terminal tasks. Each draws names and content, and says what must be there afterwards.

_NAMES = (
    *("notes", "draft", "todo", "plan", "list", "data", "memo", "log", "report", "index", "main", "names", "words"),
    *("keys", "books", "orders", "stock", "guests", "prices", "cities"),
)
_WORDS = (
    *("apple", "river", "stone", "cloud", "lamp", "paper", "green", "seven", "music", "north", "silver", "window"),
    *("garden", "bridge", "winter", "pencil", "market", "ocean", "forest", "candle"),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """
    Args:
        start: files at the beginning.
        changed: what is different at the end; None: the file is gone. All other files must be as they were.
        solution: a shell script that does it.
    """

    instruction: str
    start: Mapping[str, str]
    changed: Mapping[str, str | None]
    solution: str


Kind = Callable[[random.Random], Scenario]


def _files(rng: random.Random, count: int) -> list[str]:
    return [f"{name}.txt" for name in rng.sample(_NAMES, count)]


def _lines(rng: random.Random, least: int = 4, most: int = 9) -> list[str]:
    return [" ".join(rng.sample(_WORDS, rng.randint(1, 3))) for _ in range(rng.randint(least, most))]


def _text(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def copy(rng: random.Random) -> Scenario:
    source, target = _files(rng, 2)
    text = _text(_lines(rng))
    return Scenario(f"Copy {source} to {target}.", {source: text}, {target: text}, f"cp {source} {target}")


def rename(rng: random.Random) -> Scenario:
    source, target = _files(rng, 2)
    text = _text(_lines(rng))
    return Scenario(
        f"Rename {source} to {target}.", {source: text}, {source: None, target: text}, f"mv {source} {target}"
    )


def delete(rng: random.Random) -> Scenario:
    gone, kept = _files(rng, 2)
    start = {gone: _text(_lines(rng)), kept: _text(_lines(rng))}
    return Scenario(f"Delete {gone} and keep {kept}.", start, {gone: None}, f"rm {gone}")


def append(rng: random.Random) -> Scenario:
    (file,) = _files(rng, 1)
    text, added = _text(_lines(rng)), " ".join(rng.sample(_WORDS, 2))
    changed = {file: f"{text}{added}\n"}
    return Scenario(f'Add the line "{added}" at the end of {file}.', {file: text}, changed, f"echo '{added}' >> {file}")


def replace(rng: random.Random) -> Scenario:
    (file,) = _files(rng, 1)
    lines = _lines(rng)
    old = lines[0].split()[0]
    new = rng.choice([word for word in _WORDS if word != old])
    text = _text(lines)
    instruction = f'Replace every "{old}" in {file} by "{new}".'
    return Scenario(instruction, {file: text}, {file: text.replace(old, new)}, f"sed -i 's/{old}/{new}/g' {file}")


def sort(rng: random.Random) -> Scenario:
    (file,) = _files(rng, 1)
    lines = _lines(rng)
    while lines == sorted(lines):
        lines = _lines(rng)
    solution = f"LC_ALL=C sort -o {file} {file}"
    return Scenario(f"Sort the lines of {file}.", {file: _text(lines)}, {file: _text(sorted(lines))}, solution)


def count(rng: random.Random) -> Scenario:
    source, target = _files(rng, 2)
    lines = _lines(rng)
    instruction = f"Write the number of lines of {source} to {target}."
    return Scenario(instruction, {source: _text(lines)}, {target: str(len(lines))}, f"wc -l < {source} > {target}")


def search(rng: random.Random) -> Scenario:
    source, target = _files(rng, 2)
    lines = _lines(rng, 6, 10)
    word = lines[0].split()[0]
    found = [line for line in lines if word in line]
    instruction = f'Write the lines of {source} that contain "{word}" to {target}.'
    return Scenario(instruction, {source: _text(lines)}, {target: _text(found)}, f"grep {word} {source} > {target}")


def join(rng: random.Random) -> Scenario:
    first, second, target = _files(rng, 3)
    start = {first: _text(_lines(rng)), second: _text(_lines(rng))}
    changed = {target: start[first] + start[second]}
    instruction = f"Write {first} and then {second} to {target}."
    return Scenario(instruction, start, changed, f"cat {first} {second} > {target}")


def move(rng: random.Random) -> Scenario:
    (file,) = _files(rng, 1)
    folder = rng.choice(_WORDS)
    text = _text(_lines(rng))
    instruction = f"Make a folder {folder} and move {file} into it."
    changed = {file: None, f"{folder}/{file}": text}
    return Scenario(instruction, {file: text}, changed, f"mkdir {folder}\nmv {file} {folder}/")


def head(rng: random.Random) -> Scenario:
    source, target = _files(rng, 2)
    lines = _lines(rng, 5, 9)
    number = rng.randint(2, 4)
    instruction = f"Write the first {number} lines of {source} to {target}."
    changed = {target: _text(lines[:number])}
    return Scenario(instruction, {source: _text(lines)}, changed, f"head -n {number} {source} > {target}")


def total(rng: random.Random) -> Scenario:
    source, target = _files(rng, 2)
    numbers = [rng.randint(1, 99) for _ in range(rng.randint(4, 9))]
    instruction = f"Each line of {source} is a number. Write their sum to {target}."
    solution = f"sum=0\nwhile read -r number; do sum=$((sum + number)); done < {source}\necho $sum > {target}"
    start = {source: _text([str(number) for number in numbers])}
    return Scenario(instruction, start, {target: str(sum(numbers))}, solution)


KINDS: tuple[Kind, ...] = (copy, rename, delete, append, replace, sort, count, search, join, move, head, total)
KINDS_BY_NAME: Mapping[str, Kind] = {kind.__name__: kind for kind in KINDS}


def repeated(kind: Kind, times: int, rng: random.Random) -> Scenario:
    """A task of this kind so many times, each on files of its own."""
    parts: list[Scenario] = []
    taken: set[str] = set()
    while len(parts) < times:
        part = kind(rng)
        # The first name of a path: a folder that one part makes is no other's.
        names = {path.partition("/")[0] for path in (*part.start, *part.changed)}
        if not names & taken:
            taken |= names
            parts.append(part)
    if len(parts) == 1:
        return parts[0]
    return Scenario(
        " ".join(part.instruction for part in parts),
        {path: text for part in parts for path, text in part.start.items()},
        {path: text for part in parts for path, text in part.changed.items()},
        "\n".join(part.solution for part in parts),
    )


# The environment ------------------------------------------------------------------------------------------------------
# The environment `terminal`: a dozen kinds of tasks with files and text, as Harbor task directories.

_TEST = b"python3 -I /tests/check.py\n"
_SECONDS = 600.0


class TerminalEnvironment:
    """Satisfies `clawloop.environments.task.Environment`."""

    name = "terminal"

    def __init__(self, harness: CommandHarness | None = None) -> None:
        self._harness = harness

    def task(self, task_id: str) -> EnvironmentTask:
        split, number, chosen = parse_chosen_task_id(self.name, task_id)
        return environment_task(task_id, generated_task(split, number, chosen), self._harness)


def generated_task(split: Split, number: int, chosen: ChosenKind | None = None) -> HarborTask:
    """The `number`-th task of a split: the kinds in turn, each with names and content of its own.

    A level is how often the task is to be done, on other files each time.
    """
    kind = KINDS[number % len(KINDS)] if chosen is None else KINDS_BY_NAME[chosen.kind]
    times = 1 if chosen is None else chosen.level
    drawn = random.Random(f"terminal {split} {number}")
    while True:
        task = as_harbor_task(repeated(kind, times, drawn))
        if task.split is split:
            return task


def as_harbor_task(scenario: Scenario) -> HarborTask:
    check = importlib.resources.files("clawloop.environments.terminal") / "inside" / "check.py"
    return HarborTask(
        instruction=scenario.instruction,
        start={path: content.encode() for path, content in scenario.start.items()},
        tests={
            "test.sh": _TEST,
            "check.py": check.read_bytes(),
            "expected.json": json.dumps({**scenario.start, **scenario.changed}).encode(),
        },
        solution={"solve.sh": scenario.solution.encode()},
        agent_seconds=_SECONDS,
    )
