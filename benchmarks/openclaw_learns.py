"""The real OpenClaw on a real model: a person corrects in chat how it uses its tools.

OpenClaw comes from npm and has two tools, read and write, within its own workspace. Everything behind it is what `up`
starts: gateway, PostgreSQL, Temporal, vLLM, trainer. The person has one preference, which a rule checks on the tools
that were called and on the answer, and reacts in words alone, without a judge and ratings. Held-out requests are
measured on the frozen model, on the version that chat has trained, and on the frozen model with all that the person
said as notes in AGENTS.md. Each finished arm is added to a file; what is there is not run again. Run as
`make bench ARGS="openclaw-learns FOLDER --seeds 100,101,102"`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from rich.console import Console

from benchmarks.options import at_least
from clawloop.app.cli.openclaw_config import configuration, merged
from clawloop.app.cli.up import prepare_deployment
from clawloop.app.demo.admin_client import AdminClient
from clawloop.app.demo.run import DemoSetup, database_of
from clawloop.app.local.model_layout import ModelOptions, widest_dtype
from clawloop.app.local.parts import Deployment
from clawloop.app.local.supervision.supervisor import LineBoard, TableBoard, open_board
from clawloop.app.local.up import Started
from clawloop.app.local.up import run as run_up
from clawloop.core.contracts.serving import Scope
from clawloop.core.recipes.recipe import WITHOUT_JUDGE, Recipe
from db.serving.directory import ensure_policy
from db.serving.keys import PostgresKeyStore
from db.training.recipes import ensure_recipe
from tests.e2e.openclaw.resident import OpenClaw, running_openclaw
from tests.e2e.openclaw.script import about, text_of

OUT = Path(__file__).parent / "results" / "openclaw-learns.jsonl"
ARMS, TOOLS = ("frozen", "trained", "notes"), ["read", "write"]
CONTEXT, REPLY_TOKENS = 8192, 160  # OpenClaw's first prompt has 3,010 tokens with these tools
BELIEVED_CONTEXT = 65_536  # by OpenClaw: it compacts nothing
MOST_BEFORE = 0.6
TURN_SECONDS = 3600  # a prompt of some thousand tokens takes minutes on two busy cores
RECORDED_SECONDS, LEARNED_SECONDS, POLL_SECONDS = 300.0, 7200.0, 1.0

# The person -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The tools that OpenClaw called for one message, its answer, and the tokens of its first prompt."""

    said: str
    calls: list[str]
    text: str
    seconds: float
    prompt_tokens: int | None
    version: int


class Preference(StrEnum):
    """A preference about tools; `openclaw_words.toml` has the words of such a person."""

    ASKS = "asks"  # before it writes a file
    ITSELF = "itself"  # answers without a tool what it knows
    WRITES = "writes"  # into a file what it is told

    def is_met(self, run: Run) -> bool:
        return bool(run.text.strip()) and _RULES[self](run)


# OpenClaw adds the last two to what is allowed.
_WRITING = {"write", "apply_patch", "tool_call"}
_RULES: Mapping[Preference, Callable[[Run], bool]] = {
    Preference.ASKS: lambda run: _WRITING.isdisjoint(run.calls) and "?" in run.text,
    Preference.ITSELF: lambda run: not run.calls,
    Preference.WRITES: lambda run: not _WRITING.isdisjoint(run.calls),
}
_SAID = tomllib.loads(Path(__file__).with_name("openclaw_words.toml").read_text(encoding="utf-8"))
_HELD_OUT_EVERY = 3  # every third subject is for measuring alone


def requests(preference: Preference, *, held_out: bool) -> list[str]:
    """Messages of a person; no subject of a chat is among those held out."""
    said = _SAID[preference]
    chosen = [each for at, each in enumerate(_SAID[said["subjects"]]) if (at % _HELD_OUT_EVERY == 0) is held_out]
    return [ask.format(each) for ask in said["asks"] for each in chosen]


# OpenClaw and the gateway ---------------------------------------------------------------------------------------------


@dataclass
class Access:
    """A policy behind a running gateway, and which of its turns were read.

    Args:
        frozen: the served name of the base model.
    """

    url: str
    policy: str
    key: str
    frozen: str
    _seen: set[str] = field(default_factory=set)

    def openclaw(
        self, folder: Path, *, model: str, measuring: bool, notes: bool = False
    ) -> AbstractAsyncContextManager[OpenClaw]:
        """OpenClaw by what `clawloop openclaw-config --merge` prints, with little in its prompt beside its own words.

        Args:
            model: the served name; measuring: its turns teach nothing; notes: AGENTS.md is part of the prompt.
        """

        def configure(own: dict[str, Any]) -> dict[str, Any]:
            made = merged(own, configuration(self.url, self.key, BELIEVED_CONTEXT, REPLY_TOKENS), self.url)
            main = made["models"]["providers"]["clawloop"]["models"][0]
            main |= {"id": model, "headers": {"X-Turn-Type": "side"} if measuring else {}}
            defaults = made["agents"]["defaults"]
            defaults["heartbeat"] |= {"every": "0m"}
            defaults |= {"model": {"primary": f"clawloop/{model}"}, "timeoutSeconds": TURN_SECONDS}
            defaults |= {"skills": [], "contextInjection": "always" if notes else "never"}
            return made | {"tools": {"allow": TOOLS, "fs": {"workspaceOnly": True}}}

        return running_openclaw(folder, configure, turn_seconds=TURN_SECONDS)

    async def say(self, client: OpenClaw, text: str, conversation: str) -> Run:
        """Say something, and read from the gateway what OpenClaw did for it."""
        began = time.monotonic()
        answer = await client.say(text, conversation)
        seconds = round(time.monotonic() - began, 1)
        async with asyncio.timeout(RECORDED_SECONDS):
            while True:
                turns = await self._new_turns()
                if done := [turn for turn in turns if not _calls(turn)]:
                    break
                await asyncio.sleep(POLL_SECONDS)
        self._seen |= {turn["turn"]["id"] for turn in turns}
        calls = [name for turn in turns for name in _calls(turn)]
        first = turns[0]
        prompt = len(first["tokens"]["prompt_ids"]) if first.get("tokens") else None
        said = text_of(done[-1]["response"] or {}) or answer
        return Run(text, calls, said, seconds, prompt, first["turn"]["version"])

    async def _new_turns(self) -> list[dict[str, Any]]:
        """Answers to a person that were not read before, in order."""
        headers = {"Authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120) as client:
            listed = (await client.get("/admin/v1/sessions", params={"policy": self.policy, "limit": 5})).json()
            found = []
            for session in listed["sessions"]:
                detail = (await client.get(f"/admin/v1/sessions/{session['id']}")).json()
                for turn in detail["turns"]:
                    if turn["id"] not in self._seen:
                        found.append(
                            (await client.get(f"/admin/v1/turns/{turn['id']}", params={"tokens": "true"})).json()
                        )
        return sorted(
            (turn for turn in found if about(turn["messages"]).what == "turn"), key=lambda turn: str(turn["turn"]["id"])
        )


def _calls(turn: Mapping[str, Any]) -> list[str]:
    return [str(call["function"]["name"]) for call in (turn["response"] or {}).get("tool_calls") or ()]


# Arms -----------------------------------------------------------------------------------------------------------------


def recipe(batch: int, lr: float) -> Recipe:
    """`hindsight` at the pace of a person who corrects a few answers."""
    train = WITHOUT_JUDGE.train
    optimiser = train.optimiser.model_copy(update={"lr": lr})
    # How far a next message moves this model was not measured.
    unbound = train.distillation.model_copy(update={"hint_distance": None})
    pace = train.model_copy(update={"batch_samples": batch, "optimiser": optimiser, "distillation": unbound})
    return WITHOUT_JUDGE.model_copy(update={"name": "openclaw_hindsight", "train": pace})


@dataclass
class Seed:
    """One person with a policy of its own; `ready` and `use` are for `clawloop up`."""

    number: int
    scratch: Path
    options: argparse.Namespace
    wishes: dict[str, None] = field(default_factory=dict)
    _key: str = ""
    access: Access = field(init=False)  # once everything has started

    @property
    def policy(self) -> str:
        return f"openclaw-{self.number}"

    async def ready(self, deployment: Deployment) -> Mapping[str, str]:
        secrets = await prepare_deployment(deployment)
        database = database_of(deployment)
        try:
            await ensure_policy(database, self.policy, deployment.base_model, [])
            await ensure_recipe(database, self.policy, recipe(self.options.batch, self.options.lr))
            _, self._key = await PostgresKeyStore(database).create_key(self.policy, frozenset(Scope), name="a person")
        finally:
            await database.close()
        return secrets

    async def use(self, started: Started) -> None:
        """Measure the arms that are missing, in their order: notes are what the person said in the chat."""
        base = started.deployment.base_model
        self.access = Access(started.gateway, self.policy, self._key, base)
        done = finished(self.options.out).get(self.number, {})
        if "frozen" in done:
            preference = Preference(done["frozen"]["preference"])
        else:
            preference, runs = await self._draw()
            self.keep("frozen", preference, runs)
        if "trained" in done:
            self.wishes = dict.fromkeys(done["trained"]["wishes"])
        else:
            chat, met = await self._chat(preference)
            runs = await self._measure(preference, "trained", "policy")
            self.keep("trained", preference, runs, wishes=list(self.wishes), met_in_chat=met, chat=chat)
        if "notes" not in done:
            self.keep("notes", preference, await self._measure(preference, "notes", self.access.frozen, self.wishes))

    async def _draw(self) -> tuple[Preference, list[Run]]:
        """The seed's first preference that the frozen model meets in at most 60 % of its answers."""
        order = random.Random(f"preference {self.number}").sample(list(Preference), len(Preference))
        for preference in order:
            runs = await self._measure(preference, f"frozen-{preference.name}", self.access.frozen)
            if share(preference, runs) <= MOST_BEFORE:
                return preference, runs
            self.keep("too good", preference, runs)
        raise SystemExit(f"the model meets each preference in more than {MOST_BEFORE:.0%} of its answers")

    async def _measure(
        self, preference: Preference, name: str, model: str, notes: Mapping[str, None] | None = None
    ) -> list[Run]:
        asked = requests(preference, held_out=True)[: self.options.held_out]
        folder = self.scratch / name
        async with self.access.openclaw(folder, model=model, measuring=True, notes=notes is not None) as client:
            if notes is not None:
                lines = ["# What the user said about earlier answers", *(f"- {each}" for each in notes)]
                (folder / "workspace" / "AGENTS.md").write_text("\n".join(lines), encoding="utf-8")
            runs = []
            for at, request in enumerate(asked):
                runs.append(await self.access.say(client, request, f"{name}-{at}"))
                told = f"{runs[-1].calls} {runs[-1].text[:60]!r} in {runs[-1].seconds} s"
                print(f"seed {self.number}, {name}: {request} -> {told}", flush=True)
            return runs

    async def _chat(self, preference: Preference) -> tuple[list[dict[str, Any]], list[bool]]:
        """Sessions of two requests, with what the person says of each answer; then wait until it is learned."""
        draw = random.Random(f"chat {self.number}")
        asked = draw.sample(requests(preference, held_out=False), 2 * self.options.sessions)
        chat: list[dict[str, Any]] = []
        met: list[bool] = []
        async with self.access.openclaw(self.scratch / "chat", model="policy", measuring=False) as client:
            for session in range(self.options.sessions):
                conversation = f"chat-{session}"
                for request in asked[2 * session : 2 * session + 2]:
                    run = await self.access.say(client, request, conversation)
                    met.append(preference.is_met(run))
                    reaction = draw.choice(_SAID["thanks"] if met[-1] else _SAID[preference]["wishes"])
                    if not met[-1]:
                        self.wishes[reaction] = None
                    after = await self.access.say(client, reaction, conversation)
                    chat += [asdict(run) | {"met": met[-1]}, asdict(after)]
                await self._learned()
                print(f"seed {self.number}: session {session + 1}, version {chat[-1]['version']}, {met}", flush=True)
        return chat, met

    async def _learned(self) -> None:
        """Wait until every full batch is a version: people take longer for a session than this machine for a step."""
        async with AdminClient(self.access.url, self.access.key) as admin, asyncio.timeout(LEARNED_SECONDS):
            while True:
                if (await admin.training_status(self.access.policy)).is_done:
                    return
                await asyncio.sleep(POLL_SECONDS)

    def keep(self, arm: str, preference: Preference, runs: Sequence[Run], **more: Any) -> None:
        """Add a finished arm to the file."""
        line = {
            "seed": self.number,
            "arm": arm,
            "preference": preference.value,
            "share": share(preference, runs),
            "seconds": fmean(run.seconds for run in runs),
            "tools": TOOLS,
            "batch": self.options.batch,
            "lr": self.options.lr,
            "runs": [asdict(run) | {"met": preference.is_met(run)} for run in runs],
        }
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        with self.options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | more) + "\n")
        print(f"seed {self.number}, {arm}: {preference}: {line['share']:.0%} of {len(runs)}", flush=True)


def share(preference: Preference, runs: Sequence[Run]) -> float:
    """Share of the runs that meet a preference."""
    return fmean(preference.is_met(run) for run in runs)


def finished(path: Path) -> dict[int, dict[str, dict[str, Any]]]:
    """The arms in a file of results, by seed."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        line = json.loads(text)
        found.setdefault(line["seed"], {})[line["arm"]] = line
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks openclaw-learns", description="OpenClaw on a real model")
    parser.add_argument("model", type=Path, help="folder of a model whose chat template knows tools")
    parser.add_argument("--seeds", default="1", help="between commas; 1 to 99 are for tuning")
    parser.add_argument("--sessions", type=at_least(1), default=8, help="of two requests each, before measuring again")
    parser.add_argument("--held-out", type=at_least(1), default=16, help="requests that each arm is measured by")
    parser.add_argument("--batch", type=at_least(1), default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--context", type=at_least(1024), default=CONTEXT)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    for seed in map(int, options.seeds.split(",")):
        if set(ARMS) <= finished(options.out).get(seed, {}).keys():
            continue
        with tempfile.TemporaryDirectory() as scratch:
            setup = DemoSetup(data=Path(scratch) / "data", out=options.out.parent, environment=dict(os.environ))
            with setup.installation(options.model.absolute(), None, sandboxes=False) as up:
                models = ModelOptions(dtype=widest_dtype(), max_model_len=options.context)
                person = Seed(seed, Path(scratch) / "openclaw", options)
                with open_board(Console(), LineBoard, TableBoard) as board:
                    asyncio.run(run_up(replace(up, models=models), board, person.ready, person.use))
    for seed, arms in finished(options.out).items():
        shares = ", ".join(f"{arm} {line['share']:.0%}" for arm, line in arms.items() if arm in ARMS)
        print(f"seed {seed}, {next(iter(arms.values()))['preference']}: {shares}")


if __name__ == "__main__":
    main()
