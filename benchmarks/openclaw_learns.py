"""The real OpenClaw on a real model: a person corrects in chat how it uses its tools.

OpenClaw comes from npm and has two tools, read and write, within its own workspace. Everything behind it is what `up`
starts: gateway, PostgreSQL, Temporal, vLLM, trainer. The person has one preference, which a rule checks on the tools
that were called and on the answer, and reacts in words alone, without a judge and ratings. Held-out requests are
measured on the frozen model, on the version that chat has trained, and on the frozen model with all that the person
said as notes in AGENTS.md. Each message is a line in a file as soon as it is answered, and the weights stay in the data
folder: a run that was ended goes on there. Run as `make bench ARGS="openclaw-learns FOLDER --seeds 100,101,102"`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
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
from clawloop.app.demo.run import database_of, parts_environment
from clawloop.app.local.model_layout import ModelOptions, widest_dtype
from clawloop.app.local.parts import Deployment
from clawloop.app.local.plan import UpOptions
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
TURN_SECONDS = 900  # a prompt of some thousand tokens takes a minute on two cores; a loop of tool calls has no end
RECORDED_SECONDS, LEARNED_SECONDS, POLL_SECONDS = 300.0, 7200.0, 1.0

# The person -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """The tools that OpenClaw called for one message, its answer, the tokens of its first prompt, and why it failed."""

    said: str
    calls: list[str]
    text: str
    seconds: float
    prompt_tokens: int | None
    version: int | None
    failed: str | None = None


class Preference(StrEnum):
    """A preference about tools; `openclaw_words.toml` has the words of such a person."""

    ASKS = "asks"  # before it writes a file
    ITSELF = "itself"  # answers without a tool what it knows
    WRITES = "writes"  # into a file what it is told

    def is_met(self, run: Run) -> bool:
        return bool(run.text.strip()) and _RULES[self](run)


# OpenClaw adds the last two to what is allowed.
_WRITING = {"write", "apply_patch", "tool_call"}
# A call that a model writes as text, for the person to read.
_WRITTEN_CALL = re.compile(r'"(function|name|arguments)"\s*:')
_RULES: Mapping[Preference, Callable[[Run], bool]] = {
    Preference.ASKS: lambda run: _WRITING.isdisjoint(run.calls) and "?" in run.text,
    Preference.ITSELF: lambda run: not run.calls and not _WRITTEN_CALL.search(run.text),
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
        """Say something, and read from the gateway what OpenClaw did for it; what fails did nothing."""
        began, answer, failed = time.monotonic(), "", None
        turns: list[dict[str, Any]] = []
        try:
            answer = await client.say(text, conversation)
            async with asyncio.timeout(RECORDED_SECONDS):
                while not any(not _calls(turn) for turn in turns):
                    await asyncio.sleep(POLL_SECONDS)
                    turns = await self._new_turns()
        except (AssertionError, TimeoutError, httpx.HTTPError) as error:  # OpenClaw gave up, or never came to an answer
            failed = f"{type(error).__name__}: {error}"[:500]
            turns = await self._new_turns()
        seconds = round(time.monotonic() - began, 1)
        self._seen |= {turn["turn"]["id"] for turn in turns}
        calls = [name for turn in turns for name in _calls(turn)]
        done = [turn for turn in turns if not _calls(turn)]
        prompt = len(turns[0]["tokens"]["prompt_ids"]) if turns and turns[0].get("tokens") else None
        said = text_of(done[-1]["response"] or {}) if done else ""
        version = turns[0]["turn"]["version"] if turns else None
        return Run(text, calls, "" if failed else said or answer, seconds, prompt, version, failed)

    async def waiting(self) -> int:
        """How many answers of the newest session wait for a reaction, or for what is made of it."""
        async with self._client() as client:
            newest = (await self._sessions(client, 1))[0]
            turns = (await client.get(f"/admin/v1/sessions/{newest['id']}")).json()["turns"]
        return sum(turn["outcome"] == "waiting" for turn in turns)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=120)

    async def _sessions(self, client: httpx.AsyncClient, limit: int) -> list[dict[str, Any]]:
        listed = await client.get("/admin/v1/sessions", params={"policy": self.policy, "limit": limit})
        return list(listed.json()["sessions"])

    async def _new_turns(self) -> list[dict[str, Any]]:
        """Answers to a person that were not read before, in order."""
        found = []
        async with self._client() as client:
            for session in await self._sessions(client, 5):
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


@dataclass(frozen=True)
class Lines:
    """The file of results: a line for each message, of runs by these options.

    Args:
        options: that decide on what is measured; lines of other ones are left alone.
    """

    path: Path
    options: Mapping[str, Any]

    def runs(self, seed: int, arm: str, preference: Preference) -> list[dict[str, Any]]:
        texts = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        of = self._of(seed, arm, preference)
        return [line for text in texts if of.items() <= (line := json.loads(text)).items()]

    def add(self, seed: int, arm: str, preference: Preference, run: Run, **more: Any) -> None:
        line = self._of(seed, arm, preference) | {"met": preference.is_met(run), "run": asdict(run)} | more
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        told = f"{run.calls} {run.text[:60]!r} in {run.seconds} s{f', {run.failed}' if run.failed else ''}"
        print(f"seed {seed}, {arm}: {run.said} -> {told}", flush=True)

    def _of(self, seed: int, arm: str, preference: Preference) -> dict[str, Any]:
        return {"seed": seed, "arm": arm, "preference": preference.value, "options": dict(self.options)}


@dataclass
class Seed:
    """One person with a policy of its own; `ready` and `use` are for `clawloop up`."""

    number: int
    scratch: Path
    lines: Lines
    held_out: int
    sessions: int
    recipe: Recipe
    _key: str = ""
    access: Access = field(init=False)  # once everything has started
    measured: bool = False

    @property
    def policy(self) -> str:
        return f"openclaw-{self.number}"

    async def ready(self, deployment: Deployment) -> Mapping[str, str]:
        secrets = await prepare_deployment(deployment)
        database = database_of(deployment)
        try:
            await ensure_policy(database, self.policy, deployment.base_model, [])
            await ensure_recipe(database, self.policy, self.recipe)
            _, self._key = await PostgresKeyStore(database).create_key(self.policy, frozenset(Scope), name="a person")
        finally:
            await database.close()
        return secrets

    async def use(self, started: Started) -> None:
        """Measure what is missing, in the arms' order: notes are what the person said in the chat."""
        base = started.deployment.base_model
        self.access = Access(started.gateway, self.policy, self._key, base)
        preference = await self._draw()
        await self._chat(preference)
        await self._measure(preference, "trained", "policy")
        said = [line["reaction"] for line in self.lines.runs(self.number, "chat", preference) if not line["met"]]
        await self._measure(preference, "notes", self.access.frozen, notes=list(dict.fromkeys(said)))
        print(f"seed {self.number}, {preference}: {self.shares(preference)}", flush=True)
        self.measured = True

    def shares(self, preference: Preference) -> str:
        found = {arm: self.lines.runs(self.number, arm, preference) for arm in ARMS}
        return ", ".join(f"{arm} {share(runs):.0%} of {len(runs)}" for arm, runs in found.items() if runs)

    async def _draw(self) -> Preference:
        """The seed's first preference that the frozen model meets in at most 60 % of its answers."""
        for preference in random.Random(f"preference {self.number}").sample(list(Preference), len(Preference)):
            await self._measure(preference, "frozen", self.access.frozen)
            if share(self.lines.runs(self.number, "frozen", preference)) <= MOST_BEFORE:
                return preference
        raise SystemExit(f"the model meets each preference in more than {MOST_BEFORE:.0%} of its answers")

    async def _measure(
        self, preference: Preference, arm: str, model: str, *, notes: Sequence[str] | None = None
    ) -> None:
        """Ask the held-out requests that were not asked yet."""
        asked = requests(preference, held_out=True)[: self.held_out]
        done = len(self.lines.runs(self.number, arm, preference))
        if done == len(asked):
            return
        folder = Path(tempfile.mkdtemp(prefix=f"{arm}-", dir=self.scratch))
        async with self.access.openclaw(folder, model=model, measuring=True, notes=notes is not None) as client:
            if notes is not None:
                lines = ["# What the user said about earlier answers", *(f"- {each}" for each in notes)]
                (folder / "workspace" / "AGENTS.md").write_text("\n".join(lines), encoding="utf-8")
            for at in range(done, len(asked)):
                run = await self.access.say(client, asked[at], f"{arm}-{at}")
                self.lines.add(self.number, arm, preference, run)

    async def _chat(self, preference: Preference) -> None:
        """Sessions of a request and what the person says of the answer, each learned before the next one.

        A further request in a session would be the next state of the answer to that, and say nothing of it.
        """
        asked = random.Random(f"chat {self.number}").sample(requests(preference, held_out=False), self.sessions)
        done = len(self.lines.runs(self.number, "chat", preference))
        if done == self.sessions:
            return
        folder = Path(tempfile.mkdtemp(prefix="chat-", dir=self.scratch))
        async with self.access.openclaw(folder, model="policy", measuring=False) as client:
            for session in range(done, self.sessions):
                run = await self.access.say(client, asked[session], f"chat-{session}")
                said = _SAID["thanks"] if preference.is_met(run) else _SAID[preference]["wishes"]
                reaction = random.Random(f"reaction {self.number} {session}").choice(said)
                after = await self.access.say(client, reaction, f"chat-{session}")
                await self._learned()
                self.lines.add(self.number, "chat", preference, run, reaction=reaction, after=asdict(after))

    async def _learned(self) -> None:
        """Wait until the person's reaction is taken in and every full batch is a version: people take longer than that.

        The last answer of each session still waits then, for a reaction that does not come.
        """
        async with AdminClient(self.access.url, self.access.key) as admin, asyncio.timeout(LEARNED_SECONDS):
            while True:
                waiting = await self.access.waiting()
                status = await admin.training_status(self.access.policy)
                if waiting <= 1 and status.model_copy(update={"judging": 0}).is_done:
                    return
                await asyncio.sleep(POLL_SECONDS)


def share(lines: Sequence[Mapping[str, Any]]) -> float:
    """Share of the lines whose run meets the preference; at least one."""
    return fmean(bool(line["met"]) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks openclaw-learns", description="OpenClaw on a real model")
    parser.add_argument("model", type=Path, help="folder of a model whose chat template knows tools")
    parser.add_argument("--seeds", default="1", help="between commas; 1 to 99 are for tuning")
    parser.add_argument("--sessions", type=at_least(1), default=16, help="of one request, before measuring again")
    parser.add_argument("--held-out", type=at_least(1), default=16, help="requests that each arm is measured by")
    parser.add_argument("--batch", type=at_least(1), default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--context", type=at_least(1024), default=CONTEXT)
    parser.add_argument("--data", type=Path, default=Path(".clawloop/openclaw-learns"), help="a folder for each seed")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    decide = {"model": options.model.name} | {
        name: getattr(options, name) for name in ("sessions", "held_out", "batch", "lr", "context")
    }
    lines = Lines(options.out, decide)
    for seed in map(int, options.seeds.split(",")):
        folder = (options.data / f"{options.model.name}-{seed}").absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            up = UpOptions(
                data=folder, environment=parts_environment(os.environ, toy=False), port=0, gateways=1,
                temporal_port=0, temporal_ui_port=0, engine_port=0, model=options.model.absolute(),
                models=ModelOptions(dtype=widest_dtype(), max_model_len=options.context), sandboxes=False,
            )  # fmt: skip
            pace = recipe(options.batch, options.lr)
            person = Seed(seed, Path(scratch), lines, options.held_out, options.sessions, pace)
            with open_board(Console(), LineBoard, TableBoard) as board:
                asyncio.run(run_up(up, board, person.ready, person.use))
            if not person.measured:
                raise SystemExit("stopped: the same command goes on from here")


if __name__ == "__main__":
    main()
