"""Faults by seed in the whole system, while 16 sessions chat: what was lost, and how long recovery took.

    make chaos ARGS="--runs 200 --seed 1"

As root each data folder gets a small disk of its own, which can then be full; else file sizes are limited instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.report import load_now, surroundings
from clawloop.app.local.tiny_model import ensure_tiny_model
from tests.chaos.asked_again import stored_answers
from tests.chaos.chatters import Chatters
from tests.chaos.fuzzer import Fuzzer
from tests.chaos.judged import followed_turns
from tests.chaos.practised import practised_samples
from tests.chaos.run import Outcome, problems_at_the_end, run_faults
from tests.chaos.stack import RECIPE, WITH_PRACTICE, running_stack
from tests.chaos.stand_in_engine import stand_in_engine

DISK_MEGABYTES = 1024
# The chatting sessions keep the engine busy; so few requests take nothing from them.
FUZZ_PAUSE_SECONDS = 1.0
# What recovery should take at most. An engine that was killed starts anew first, which takes a minute on two cores.
CHAT_SECONDS = 5.0
STEP_SECONDS = 60.0
ENGINE_STARTS = "kill vllm"


def main() -> int:
    arguments = _arguments()
    load_before = load_now()
    # Ended from outside, it still stops what it started and unmounts its disks.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="clawloop-chaos-") as name, ExitStack() as disks:
        folder = Path(name)
        # The service user of PostgreSQL must be able to enter it.
        folder.chmod(0o755)
        mounted = [disks.enter_context(_disk(folder / name)) for name in ("data", "postgres")]
        own_disks = all(mounted)
        if not own_disks:
            print("no disk may be mounted here: that of PostgreSQL cannot be filled, for ours files are limited")
        try:
            outcomes, at_the_end = asyncio.run(_run(folder, arguments))
        except BaseException:
            kept = tempfile.mkdtemp(prefix="clawloop-chaos-logs-")
            shutil.copytree(folder / "logs", kept, dirs_exist_ok=True)
            print(f"the run did not end; its logs: {kept}")
            raise
    print(table(outcomes))
    problems = [problem for outcome in outcomes for problem in outcome.problems] + at_the_end
    faults = sum(outcome.number > 0 and outcome.reached for outcome in outcomes)
    print(f"seed {arguments.seed}: {faults} faults, {len(problems)} problems")
    print(", ".join(f"{name} {count}" for name, count in late(outcomes).items()))
    if arguments.out is not None:
        arguments.out.write_text(as_json(outcomes, at_the_end, arguments, load_before, own_disks))
    return 1 if problems else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="how many faults")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the same seed chooses the same faults")
    parser.add_argument("--sessions", type=int, default=16, help="how many chat")
    parser.add_argument("--think", type=float, default=2.0, help="seconds between a user's messages, on average")
    parser.add_argument("--only", nargs="+", default=[""], help="only faults whose kind holds one of these texts")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer; several can die one by one")
    parser.add_argument("--judges", type=int, default=1, help="workers that judge; several can die one by one")
    hints = "learn by hints and practise a lesson, too; with --no-vllm, as random weights give no hint that counts"
    parser.add_argument("--hints", action="store_true", help=hints)
    parser.add_argument("--no-vllm", action="store_true", help="a stand-in engine without a model, on a busy machine")
    parser.add_argument("--out", type=Path, help="a file for the outcomes as JSON")
    return parser.parse_args()


async def _run(folder: Path, arguments: argparse.Namespace) -> tuple[list[Outcome], list[str]]:
    """The outcomes, and what is wrong once all have stopped chatting."""
    model = ensure_tiny_model(folder / "models")
    outcomes: list[Outcome] = []
    print(f"seed {arguments.seed}; logs in {folder / 'logs'} while it runs", flush=True)
    async with AsyncExitStack() as running:
        port = None
        if arguments.no_vllm:
            engine = await running.enter_async_context(stand_in_engine(model.name, arguments.seed))
            port = urlsplit(engine.url).port
        recipe = WITH_PRACTICE if arguments.hints else RECIPE
        stack = await running.enter_async_context(
            running_stack(folder, model, port, arguments.ranks, arguments.judges, recipe)
        )
        chatters = Chatters(stack.gateway_url, stack.keys["chat"], arguments.think, closing=True)
        fuzzer = Fuzzer(stack.gateway_url, stack.keys, FUZZ_PAUSE_SECONDS)
        await fuzzer.start()
        chatters.start(arguments.sessions, arguments.seed)
        try:
            async for outcome in run_faults(
                stack,
                chatters,
                fuzzer,
                arguments.runs,
                arguments.seed,
                lambda fault: any(text in fault.kind for text in arguments.only),
            ):
                outcomes.append(outcome)
                print(line(outcome), flush=True)
        finally:
            await asyncio.gather(chatters.end(), fuzzer.end())
        practised = await practised_samples(stack.database_url)
        at_the_end = await problems_at_the_end(stack, chatters)
        followed = await followed_turns(stack.database_url)
        by_outcome = ", ".join(f"{count} {outcome}" for outcome, count in sorted(followed.items()))
        print(f"{len(chatters.seen)} replies were acknowledged and checked; followed by another message: {by_outcome}")
        asked = sum(question.answers for question in stack.judge.questions)
        stored = sum(map(len, stored_answers(stack.database_url).values()))
        print(f"{len(chatters.ended)} sessions were ended; of {asked} answers asked of judges {stored} are stored")
        print(f"{sum(one.compared for one in outcomes)} times a served version was compared with its row and files")
        by_state = ", ".join(f"{count} {state}" for state, count in sorted(practised.items())) or "none"
        print(f"samples of practised requests: {by_state}")
        for problem in at_the_end:
            print(f"    PROBLEM at the end: {problem}")
        statuses = Counter(status for _, status in fuzzer.answered.elements())
        answered = ", ".join(f"{count} with {status}" for status, count in sorted(statuses.items()))
        unanswered = ", ".join(f"{count} {why}" for why, count in sorted(fuzzer.unanswered.items())) or "none"
        print(f"requests of any shape were answered: {answered}; not: {unanswered}")
    return outcomes, at_the_end


def as_json(
    outcomes: Sequence[Outcome],
    at_the_end: Sequence[str],
    arguments: argparse.Namespace,
    load_before: float,
    own_disks: bool,
) -> str:
    """The outcomes, and how and where they were found."""
    options = {name: value for name, value in vars(arguments).items() if name != "out"} | {"own_disks": own_disks}
    # `asdict` cannot copy a Counter.
    rows = [asdict(replace(outcome, failures=Counter())) | {"failures": dict(outcome.failures)} for outcome in outcomes]
    found = {
        "options": options,
        **surroundings(load_before),
        "late": late(outcomes),
        "outcomes": rows,
        "problems_at_the_end": [*at_the_end],
    }
    return json.dumps(found, indent=1) + "\n"


def late(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Number of late recoveries from faults after which no engine had to start."""
    counted = [one for one in outcomes if one.number > 0 and one.reached and one.kind != ENGINE_STARTS]
    steps = [one.training_seconds for one in counted if one.training_seconds is not None]
    return {
        f"faults other than {ENGINE_STARTS}": len(counted),
        f"chat later than {CHAT_SECONDS:g} s": sum(one.chat_seconds > CHAT_SECONDS for one in counted),
        f"next step later than {STEP_SECONDS:g} s": sum(seconds > STEP_SECONDS for seconds in steps),
    }


def line(outcome: Outcome) -> str:
    training = "" if outcome.training_seconds is None else f", next step after {outcome.training_seconds:.1f} s"
    failed = ", ".join(f"{count} {why}" for why, count in outcome.failures.most_common()) or "none"
    reached = "" if outcome.reached else " (not reached)"
    text = (
        f"{outcome.number:>3} {outcome.kind}{reached}, {outcome.lasted_seconds:.1f} s: "
        f"chat after {outcome.chat_seconds:.1f} s{training}; failed requests: {failed}"
    )
    return "\n".join([text, *(f"    PROBLEM {problem}" for problem in outcome.problems)])


def table(outcomes: Sequence[Outcome]) -> str:
    """Recovery by kind of fault."""
    kinds = sorted({outcome.kind for outcome in outcomes})
    rows = [
        "| fault | times | chat answers, p50 / p99 s | next step, p50 / p99 s | requests that failed |",
        "|---|---|---|---|---|",
    ]
    for kind in kinds:
        of_kind = [outcome for outcome in outcomes if outcome.kind == kind and outcome.reached]
        if not of_kind:
            continue
        failures = sum((outcome.failures for outcome in of_kind), Counter[str]())
        failed = ", ".join(f"{count} {why}" for why, count in failures.most_common()) or "none"
        chat = _percentiles([outcome.chat_seconds for outcome in of_kind])
        training = _percentiles([seconds for one in of_kind if (seconds := one.training_seconds) is not None])
        rows.append(f"| {kind} | {len(of_kind)} | {chat} | {training} | {failed} |")
    return "\n".join(rows)


def _percentiles(values: list[float]) -> str:
    if not values:
        return ""
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"{ordered[len(ordered) // 2]:.1f} / {p99:.1f}"


@contextmanager
def _disk(folder: Path) -> Iterator[bool]:
    """A disk of its own for the folder, where this user may mount one; whether it has one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MEGABYTES}m,mode=755", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
