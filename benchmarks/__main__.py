"""`make bench ARGS="NAME [OPTIONS]"`: runs a benchmark, prints its figures and keeps them in `benchmarks/results`.

python -m benchmarks NAME [--quick] [OPTIONS]    run one; without a name: list all
python -m benchmarks check [NAME…]               run those with committed ratios quickly, and compare
python -m benchmarks commit NAME [--runs N]      run one quickly three times, and commit the medians of its ratios
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.options import at_least
from benchmarks.report import Ratio, Result, load_now, print_result, write_result
from clawloop.core.errors import SetupError

PROGRAMS = {
    "gateway": "chats through gateway, aiohttp relays and LiteLLM, beside a direct client",
    "judging": "judged turns a second, signal to verdict, events a turn, with many sessions open",
    "feedback": "from feedback to a version that answers",
    "soak": "memory of each part over 10,000 turns, half of them in one session",
    "rollouts": "episodes of verifiers alone and through rollouts; what kills lose, double or leave behind",
    "train": "a training step beside PEFT + transformers and torchtune, by the batch's size; --gpu with CUDA",
}
# These print their figures; their options are their own.
PRINTING = {
    "injections": ("benchmarks.injections", "how often injected text sways a judge; --url URL --name MODEL for yours"),
    "openclaw-learns": ("benchmarks.openclaw_learns", "the real OpenClaw on a real model, corrected in chat"),
    "streams": ("benchmarks.streams", "how long streams stand still and new chats wait while judges are asked"),
    "tastes": ("benchmarks.tastes", "what recipes do to a taste and to content, on a real small model in one process"),
}
RATIOS = Path(__file__).with_name("ratios.json")
# A ratio may be this much worse than the committed one: two runs on one quiet machine differ by up to a fifth.
SLACK = 1.5


def main(arguments: Sequence[str]) -> int:
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console = Console(soft_wrap=True, width=200)
    if not arguments or arguments[0] in ("-h", "--help"):
        for name, what in PROGRAMS.items():
            console.print(f"{name:14} {what}", highlight=False)
        for name, (_, what) in PRINTING.items():
            console.print(f"{name:14} {what}", highlight=False)
        return 0
    name, *options = arguments
    if name == "check":
        return _check(options or sorted(_committed()), console)
    if name == "commit":
        return _commit(options, console)
    if name not in PROGRAMS and name not in PRINTING:
        print(f"there is no benchmark {name!r}: {', '.join([*PROGRAMS, *PRINTING])}", file=sys.stderr)
        return 2
    try:
        run(name, options, console)
    except SetupError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    return 0


def run(name: str, arguments: Sequence[str], console: Console) -> Result:
    """Run one benchmark; a quick run does not replace the result of a whole one."""
    began, load = datetime.now(UTC), load_now()
    if name in PRINTING:
        options: dict[str, object] = {"arguments": list(arguments)}
        result = _printed(PRINTING[name][0], arguments)
    else:
        module = importlib.import_module(f"benchmarks.{name.replace('-', '_')}")
        parser = argparse.ArgumentParser(prog=f"benchmarks {name}", description=PROGRAMS[name])
        parser.add_argument("--quick", action="store_true", help="small sizes, a minute or two; not for reports")
        parser.add_argument("--into", default=name, help="name of the file with the raw figures")
        module.add_options(parser)
        parsed = parser.parse_args(arguments)
        options, result = vars(parsed), module.run(parsed)
        print_result(result, console)
    kept = str(options.get("into", name))
    path = write_result(f"{kept}-quick" if options.get("quick") else kept, options, result, began, load)
    console.print(f"raw figures: {path}", highlight=False, soft_wrap=True)
    return result


def _printed(module: str, arguments: Sequence[str]) -> Result:
    """The lines that a program prints; they appear as they come."""
    lines = []
    with subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if process.returncode != 0:
        raise SystemExit(process.returncode)
    return Result(printed=lines)


def _committed() -> dict[str, dict[str, dict[str, float | str]]]:
    content: dict[str, dict[str, dict[str, float | str]]] = json.loads(RATIOS.read_text(encoding="utf-8"))
    return content


def _check(names: Sequence[str], console: Console) -> int:
    if not names:
        console.print('no ratios are committed: run "commit NAME" on a quiet machine')
        return 1
    worse = 0
    for name in names:
        found = run(name, ["--quick"], console).ratios
        for ratio, committed in _committed()[name].items():
            is_worse = is_much_worse(found.get(ratio), float(committed["value"]))
            worse += is_worse
            now = f"{found[ratio].value:.2f}" if ratio in found else "missing"
            verdict = "WORSE" if is_worse else "ok"
            console.print(f"{verdict:5} {name}, {ratio}: {now}, committed {committed['value']}", highlight=False)
    return 1 if worse else 0


def is_much_worse(found: Ratio | None, committed: float) -> bool:
    """True if a ratio is missing, or worse than the committed one by more than the slack."""
    return found is None or found.is_much_worse_than(committed, SLACK)


def _commit(arguments: Sequence[str], console: Console) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks commit", description="commit the ratios of quick runs")
    parser.add_argument("name", choices=list(PROGRAMS))
    parser.add_argument("--runs", type=at_least(1), default=3, help="whose median is committed")
    parsed = parser.parse_args(arguments)
    kept = medians([run(parsed.name, ["--quick"], console).ratios for _ in range(parsed.runs)])
    RATIOS.write_text(json.dumps(_committed() | {parsed.name: kept}, indent=1) + "\n", encoding="utf-8")
    console.print(f"{len(kept)} ratios of {parsed.name} are in {RATIOS}", highlight=False, soft_wrap=True)
    return 0


def medians(runs: Sequence[Mapping[str, Ratio]]) -> dict[str, dict[str, float | str]]:
    """Medians of each ratio that all runs have: a single run may be lucky, and all later runs would look worse."""
    first, *others = runs
    return {
        name: {"value": round(median(found[name].value for found in runs), 3), "better": ratio.better}
        for name, ratio in first.items()
        if all(name in found for found in others)
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
