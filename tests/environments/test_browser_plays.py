"""The environment browser in real Chromium in real sandboxes, with agents that solve, do nothing, or cheat."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from clawloop.core.contracts.episodes import Ending
from clawloop.core.episodes.kinds import ChosenKind
from clawloop.core.errors import SetupError
from clawloop.core.ids import new_episode_id
from clawloop.environments.browser.chromium import Chromium, chromium_folder
from clawloop.environments.browser.environment import LIMITS, BrowserEnvironment, generated_task
from clawloop.environments.browser.kinds import HARDEST_LEVEL, KINDS, Kind, search, steps
from clawloop.environments.runner import SandboxRunner
from clawloop.environments.task import Split
from clawloop.sandboxes.boxes import BoxTask
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders
from tests.api.conftest import Gateway, gateway, shared_gateway
from tests.environments.browser_agent import call, next_message
from tests.environments.scripted_model import model
from tests.fakes.replies import Reply as EngineReply

__all__ = ["gateway", "shared_gateway"]

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]

Reply = Callable[[list[dict[str, Any]]], dict[str, Any]]
# Whatever is typed or named stays text: no script, no selector of Playwright's, no other property of an object.
CHEATS = (
    call("type", {"ref": "e1", "text": "<script>fetch('/pressed',{method:'POST'})</script>"}),
    call("click", {"ref": "e1 >> xpath=//button"}),
    call("click", {"ref": "css=button"}),
    call("click", {"ref": ["e1"]}),
    call("click", {}),
    call("constructor", {"ref": "e1"}),
    call("__proto__", {}),
    call("evaluate", {"script": "document.forms[0].submit()"}),
    call("goto", {"url": "file:///task/browser.json"}),
    call("select", {"ref": "e1", "option": {"index": 1}}),
    call("scroll", {"ref": "e1", "direction": "1; document.forms[0].submit()"}),
    {"tool_calls": [{"id": "c", "function": {"name": "click", "arguments": "[]"}}]},
    call("done", {"reward": 1, "sent": [{"path": "/pressed"}]}),
)


@pytest.fixture(scope="module")
def environment() -> BrowserEnvironment:
    return BrowserEnvironment(Chromium.find(chromium_folder() / "chromium"))


async def play(
    environment: BrowserEnvironment, task: int | str, reply: Reply, split: Split = Split.TRAIN
) -> tuple[Ending, float | None]:
    task_id = f"{split}-{task}"
    async with model(reply, tool="click") as gateway:
        sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
        runner = SandboxRunner(sandboxes, {"browser": environment}, gateway)
        episode = new_episode_id()
        run = await runner.run_agent("browser", task_id, episode, "key")
        return run.ending, (await runner.verify("browser", task_id, episode, run.artifact))[0]


@pytest.mark.parametrize("number", range(len(KINDS)))
async def test_each_kind_is_solved_by_its_solution(environment: BrowserEnvironment, number: int) -> None:
    agent = partial(next_message, generated_task(Split.TEST, number).solution)
    assert await play(environment, number, agent, Split.TEST) == (Ending.COMPLETED, 1.0)
    kind = KINDS[number].__name__
    for level in (1, HARDEST_LEVEL):
        agent = partial(next_message, generated_task(Split.TRAIN, 3, chosen=ChosenKind(kind, level)).solution)
        assert await play(environment, f"3-{kind}-{level}", agent) == (Ending.COMPLETED, 1.0), level


@pytest.mark.parametrize(("kind", "hidden"), [(search, "- link"), (steps, '"Place"')])
async def test_what_is_not_there_yet_is_not_shown(environment: BrowserEnvironment, kind: Kind, hidden: str) -> None:
    """A style for `li` and `fieldset` once showed all results before the search, and all steps at once."""
    shown: list[str] = []

    def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
        shown.append(messages[-1]["content"])
        return next_message(generated_task(Split.TRAIN, KINDS.index(kind)).solution, messages)

    assert await play(environment, KINDS.index(kind), reply) == (Ending.COMPLETED, 1.0)
    assert hidden not in shown[0]
    assert any(hidden in page for page in shown)


async def test_agents_that_do_nothing_or_the_wrong_thing_or_never_stop_get_nothing(
    environment: BrowserEnvironment,
) -> None:
    assert await play(environment, 0, lambda messages: {"content": "Done."}) == (Ending.COMPLETED, 0.0)
    right = generated_task(Split.TRAIN, 0).solution[0].on

    def wrong_button(messages: list[dict[str, Any]]) -> dict[str, Any]:
        if len(messages) > 1:
            return call("done", {})
        buttons = [line for line in messages[0]["content"].splitlines() if "- button" in line and right not in line]
        return call("click", {"ref": buttons[0].split("[ref=")[1].split("]")[0]})

    assert await play(environment, 0, wrong_button) == (Ending.COMPLETED, 0.0)
    endless = call("scroll", {"ref": "e2", "direction": "down"})
    assert await play(environment, 0, lambda messages: endless) == (Ending.TRUNCATED_TURNS, 0.0)


async def test_agents_that_cheat_get_nothing_and_are_told_their_errors(environment: BrowserEnvironment) -> None:
    left, answers = list(CHEATS), list[str]()

    def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
        if messages[-1]["role"] == "tool":
            answers.append(messages[-1]["content"].splitlines()[0])
        return left.pop(0)

    assert await play(environment, 0, reply) == (Ending.COMPLETED, 0.0)
    assert len(answers) == len(CHEATS) - 1
    assert [answer for answer in answers if not answer.startswith("error: ")] == answers[10:11]  # it scrolled


async def test_two_agents_with_one_task_play_at_once_and_each_turn_is_recorded_for_its_episode(
    environment: BrowserEnvironment, gateway: Gateway
) -> None:
    solution, gave_up = generated_task(Split.TRAIN, 1).solution, list[str]()

    def answer(body: dict[str, Any]) -> EngineReply:
        if len(body["messages"]) == 1 and not gave_up:
            gave_up.append("one")
            return EngineReply(text="I cannot do this.")
        function = next_message(solution, body["messages"])["tool_calls"][0]["function"]
        return EngineReply(calls=[(function["name"], json.loads(function["arguments"]))])

    gateway.engine.script = answer
    url = urlsplit(gateway.url)
    assert url.hostname is not None
    assert url.port is not None
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    runner = SandboxRunner(sandboxes, {"browser": environment}, (url.hostname, url.port))
    keys = [gateway.keys.add_episode("default", datetime.now(UTC) + timedelta(hours=1)) for _ in range(2)]

    async def episode(number: int) -> tuple[Ending, float | None]:
        key, secret = keys[number]
        assert key.episode is not None
        run = await runner.run_agent("browser", "train-1", key.episode, secret)
        return run.ending, (await runner.verify("browser", "train-1", key.episode, run.artifact))[0]

    played = await asyncio.gather(episode(0), episode(1))
    assert sorted(played) == [(Ending.COMPLETED, 0.0), (Ending.COMPLETED, 1.0)]
    turns = [turn.episode_id for turn in await gateway.recorded(4)]
    right, wrong = (keys[played.index((Ending.COMPLETED, reward))][0].episode for reward in (1.0, 0.0))
    assert (turns.count(right), turns.count(wrong)) == (3, 1)


async def session(environment: BrowserEnvironment, pages: dict[str, str], drive: str) -> tuple[str, int]:
    """What a program prints that calls the session in a sandbox by `ask(name, **arguments)`; and how often the gateway
    was asked, which answers each request."""
    task = environment.task("train-0")
    config = json.loads(task.files["browser.json"]) | {"pages": pages}
    begin = """
import json, re, subprocess
process = subprocess.Popen(["/playwright/node", "/task/session.cjs"], stdin=-1, stdout=-1, encoding="utf8")
read = lambda: json.loads(process.stdout.readline())
def ask(name, **arguments):
    process.stdin.write(json.dumps({"name": name, "arguments": arguments}) + "\\n")
    process.stdin.flush()
    return read()["text"]
text = read()["text"]
"""
    files = {**task.files, "browser.json": json.dumps(config).encode()}
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()

    gateway = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with gateway:
        port = gateway.sockets[0].getsockname()[1]
        command = ("python3", "-c", begin + drive)
        box = BoxTask("s", command, 600.0, files, task.folders, gateway=("127.0.0.1", port), limits=LIMITS)
        return (await sandboxes.run(box)).output.decode(), len(asked)


async def test_a_click_is_answered_when_the_page_it_leads_to_is_there(environment: BrowserEnvironment) -> None:
    pages = {
        "/": "<a href=/b>to b</a>",
        "/b": "<form action=/a><button>to a</button></form>",
        "/a": "<a href=/b>to b</a>",
    }
    drive = """
for target in "ba" * 20:
    ref = re.search(r'"to %s".*?\\[ref=(\\w+)\\]' % target, text)[1]
    text = ask("click", ref=ref)
print(text.strip(), open("/work/state.json").read())
"""
    shown, _ = await session(environment, pages, drive)
    assert shown.endswith('{"sent":[],"at":"/a"}\n')


async def test_a_page_reaches_nothing_but_its_site(environment: BrowserEnvironment) -> None:
    script = """
for (const url of ["http://127.0.0.1:8080/v1/models", "http://1.1.1.1/", "file:///task/browser.json", "/known"])
  fetch(url, { mode: "no-cors" }).then(() => "reached", () => "failed").then((how) => {
    document.body.append(Object.assign(document.createElement("p"), { textContent: `${how} ${url}` }));
  });
new WebSocket("ws://127.0.0.1:8080/");
"""
    pages = {"/": f"<body><b>x</b><script>{script}</script>", "/known": "y"}
    drive = """
import time
while "known" not in text or text.count("paragraph") < 4:
    time.sleep(0.2)
    text = ask("click", ref=re.search(r"\\[ref=(\\w+)\\]", text)[1])
print(text)
"""
    shown, asked = await session(environment, pages, drive)
    assert shown.count("failed") == 3
    assert "reached /known" in shown
    assert asked == 0


async def test_a_browser_that_does_not_start_is_no_failure_of_the_agent_and_refused_by_the_worker(
    tmp_path: Path,
) -> None:
    broken = Path("/usr/bin/false")
    environment = BrowserEnvironment(Chromium.find(broken))
    assert (await play(environment, 0, lambda messages: {"content": "Done."}))[0] is Ending.INFRASTRUCTURE
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    with pytest.raises(SetupError, match=r"/usr/bin/\w+ draws no page in a sandbox"):
        await environment.probe(sandboxes)
    if os.geteuid() == 0:  # sandboxes have users of their own, who do not see this folder
        hidden = tmp_path / "chromium"
        hidden.touch()
        with pytest.raises(SetupError, match="everybody must be able to read the folders"):
            await BrowserEnvironment(Chromium.find(hidden)).probe(sandboxes)


async def test_chromium_draws_pages_here_and_models_that_see_get_them_as_pictures() -> None:
    environment = BrowserEnvironment(Chromium.find(chromium_folder() / "chromium"), screenshots=True)
    await environment.probe(await asyncio.to_thread(Bubblewrap.find, BoxFolders()))
    seen: list[list[Any]] = []
    solution = generated_task(Split.TRAIN, 0).solution

    def reply(messages: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append(messages[-1]["content"])
        return next_message(solution, messages)

    assert await play(environment, 0, reply) == (Ending.COMPLETED, 1.0)
    assert [[part["type"] for part in content] for content in seen] == [["text", "image_url"], ["image_url"]]
    assert seen[0][1]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
