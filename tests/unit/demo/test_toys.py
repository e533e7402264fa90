"""Toy environments and the report of practice."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from clawloop.app.demo.card import CARD, digest
from clawloop.app.demo.practice_report import (
    Measured,
    PracticeReport,
    Totals,
    lines,
    report_practice,
    write,
)
from clawloop.app.demo.toy_model import ToyModel, segments, tool_list
from clawloop.app.demo.toys import SWE, TERMINAL, TOOL_CALLS, TOYS, Toy, toy_of
from clawloop.app.local.checks import require_model
from clawloop.core.errors import SetupError
from clawloop.core.recipes.recipe import require_rank
from clawloop.environments.swe.environment import FUNCTIONS
from clawloop.environments.task import Split, split_of
from clawloop.environments.terminal.environment import KINDS
from clawloop.environments.tool_call.environment import question

# The shipped toys match their cards, their lessons and their environments.

MEGABYTES = 4.0
EACH = pytest.mark.parametrize("toy", TOYS.values(), ids=lambda toy: toy.environment)
SHELLS = pytest.mark.parametrize("toy", [TERMINAL, SWE], ids=lambda toy: toy.environment)


@EACH
def test_the_card_describes_these_weights(toy: Toy) -> None:
    assert f"`{digest(toy.folder)}`" in (toy.folder / CARD).read_text()


@EACH
def test_it_is_small_and_engines_can_load_it_and_its_adapters(toy: Toy) -> None:
    assert sum(path.stat().st_size for path in toy.folder.iterdir()) <= MEGABYTES * 1e6
    require_model(toy.folder)
    require_rank(toy.recipe(), 16)


@EACH
def test_lessons_are_written_as_its_chat_template_writes_them(toy: Toy) -> None:
    """Engines render prompts by the template: what the model learned must read the same, token for token."""
    model, tools = ToyModel(toy), tool_list(toy.agent)
    for messages in islice(toy.conversations(1), 100):
        last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
        pieces = segments(messages, tools)[:-2]  # without the last reply
        written = [i for text, _ in pieces for i in model.tokenizer(text, add_special_tokens=False)["input_ids"]]
        assert written == model.prompt_of(messages[:last])


@EACH
def test_the_environments_tools_are_one_token(toy: Toy) -> None:
    """After a change to them the model has to be made anew."""
    tools = tool_list(toy.agent)
    assert len(ToyModel(toy).tokenizer(tools, add_special_tokens=False)["input_ids"]) == 1


def test_no_held_out_question_is_in_a_lesson() -> None:
    asked = {str(messages[0]["content"]) for messages in islice(TOOL_CALLS.conversations(0), 300)}
    assert {split_of(text) for text in asked} == {Split.TRAIN}


def test_a_third_of_the_scripts_calculates_rightly() -> None:
    rng = random.Random(0)
    right = 0
    for number in range(500):
        asked = question(Split.TRAIN, number)
        right += str(TOOL_CALLS.conversation(asked, rng)[-1]["content"]) == f"It is {asked.answer}."
    assert 0.25 < right / 500 < 0.45


@SHELLS
def test_a_third_of_the_scripts_runs_the_right_command(toy: Toy) -> None:
    rng = random.Random(0)
    right = 0
    for number in range(500):
        task = toy.generate(Split.TRAIN, number)
        right += toy.commands(task)[0] in map(toy.argument_of, toy.conversation(task, rng))
    assert 0.3 < right / 500 < 0.5


@SHELLS
def test_no_task_for_measuring_is_in_a_lesson(toy: Toy) -> None:
    taken: list[Split] = []

    def task(split: Split, number: int) -> Any:
        taken.append(split)
        return toy.generate(split, number)

    assert len(list(islice(replace(toy, generate=task).conversations(0), 50))) == 50
    assert set(taken) == {Split.TRAIN}


@EACH
def test_it_solves_some_tasks_and_not_others(toy: Toy) -> None:
    torch.manual_seed(0)
    assert 0.15 <= ToyModel(toy).success([f"test-{number}" for number in range(96)]) <= 0.55


@EACH
def test_an_attempt_ends_with_a_reply_that_calls_nothing(toy: Toy) -> None:
    torch.manual_seed(0)
    attempts = ToyModel(toy).attempts(["train-0"] * 30)
    assert {len(attempt.turns) for attempt in attempts} >= {1, 2}
    for attempt in attempts:
        assert attempt.reward in (0.0, 1.0)
        assert [message["role"] for message in attempt.messages] == [
            "user",
            *["assistant", "tool"] * (len(attempt.turns) - 1),
        ]
        for turn in attempt.turns:
            assert len(turn.response_ids) == len(turn.logprobs)
            assert all(logprob <= 0 for logprob in turn.logprobs)


@pytest.mark.slow
@pytest.mark.parametrize(("toy", "kinds"), [(TERMINAL, len(KINDS)), (SWE, len(FUNCTIONS))], ids=["terminal", "swe"])
def test_right_commands_solve_each_kind_of_task_and_wrong_ones_do_not(toy: Toy, kinds: int) -> None:
    assert toy.look is not None
    attempts: list[tuple[int, str, float, str]] = []
    for number in range(3 * kinds):
        task = toy.generate(Split.TRAIN, number)
        right, wrong = toy.commands(task)
        look, shown = toy.look(task)
        attempts += [
            (number, right, 1.0, toy.output_of(right, task)),
            *((number, command, 0.0, toy.output_of(command, task)) for command in wrong),
            (number, look, 0.0, shown),
        ]
    states = [toy.begin(f"train-{number}") for number, *_ in attempts]
    said = toy.run(states, [command for _, command, *_ in attempts])
    found = [float(toy.is_right(state.task, state.files, "")) for state in states]
    done = [(*given[:2], *after) for given, after in zip(attempts, zip(found, said, strict=True), strict=True)]
    assert done == attempts


@pytest.mark.slow
def test_commands_of_different_attempts_meet_only_their_own_files() -> None:
    states = [TERMINAL.begin("train-0"), TERMINAL.begin("train-1")]
    said = TERMINAL.run(states, ["echo a > own; ls", "cat; ls; nothing"])
    assert said[0].split() == sorted([*states[0].task.start, "own"])
    assert said[1].splitlines()[: len(states[1].task.start)] == sorted(states[1].task.start)
    assert "nothing: command not found" in said[1]
    assert states[0].files["own"] == b"a\n"
    assert states[1].files == dict(states[1].task.start)


@pytest.mark.slow
def test_a_toy_is_made_anew_by_its_command(tmp_path: Path) -> None:
    out = tmp_path / "toy"
    command = [sys.executable, "-m", "clawloop.app.cli.main", "demo", "pretrain", "--environment", "tool-call"]
    options = ["--steps", "2", "--threads", "1", "--out", str(out)]
    # Ten seconds on an idle machine.
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"`{digest(out)}`" in (out / CARD).read_text()
    assert {path.name for path in out.iterdir()} == {path.name for path in toy_of("tool-call").folder.iterdir()}
    require_model(out)


def test_there_is_no_toy_of_other_environments() -> None:
    with pytest.raises(SetupError, match="there are demos of tool-call, terminal, swe"):
        toy_of("chess")
    with pytest.raises(SetupError, match=r"docs/environments\.md, Browser, has the commands"):
        toy_of("browser")


# The report of a demo of episodes: what it says of runs that reached the goal, lost it again, or never did.

TOTALS = Totals(Counter({"completed": 90, "truncated_turns": 6}), lost=2, groups=12, groups_constant=3)


def report(*successes: float, stopped: str | None = None) -> PracticeReport:
    measured = [Measured(n, success, 60, 0, 32 * n, 30.0 * n) for n, success in enumerate(successes)]
    return report_practice(7, measured, TOTALS, seconds=300.0, seconds_setup=60.0, stopped=stopped)


def test_a_run_that_reaches_the_goal_and_falls_again_says_so() -> None:
    found = report(0.3, 0.5, 0.8, 0.6, 0.9)
    assert (found.success_before, found.success_after, found.gain, found.best) == (0.3, 0.9, 0.6, 0.9)
    assert (found.seconds_to_goal, found.least_after_goal) == (60.0, 0.6)
    assert (found.episodes, found.endings) == (96, {"completed": 90, "truncated_turns": 6})
    assert lines(found)[0] == (
        "seed 7: success on held-out tasks 30% → 90% (best 90%); 75% after 1.0 min, never below 60% after that"
    )


def test_a_run_that_never_reaches_the_goal_says_so() -> None:
    found = report(0.3, 0.4, 0.2, stopped="40 minutes are over")
    assert (found.seconds_to_goal, found.least_after_goal, found.gain) == (None, None, -0.1)
    assert lines(found)[0].endswith("75% not reached")
    assert lines(found)[-1] == "seed 7: ended early: 40 minutes are over"


def test_the_report_is_written_and_read_back(tmp_path: Path) -> None:
    write(tmp_path / "demo-x.json", [report(0.3, 0.8), report(0.2, 0.3)])
    written = json.loads((tmp_path / "demo-x.json").read_text())
    assert [run["gain"] for run in written["runs"]] == [0.5, 0.1]
    assert (written["summary"]["reached_goal"], written["summary"]["gain_least"]) == (1, 0.1)
    with pytest.raises(SetupError, match="choose another folder"):
        write(tmp_path / "none" / "demo-x.json", [report(0.3, 0.8)])
