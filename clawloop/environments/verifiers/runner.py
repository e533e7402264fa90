"""Episodes of one environment of verifiers, which owns agent, tools, boxes and scoring."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import shutil
import signal
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from clawloop.core.contracts.episodes import UNIT_RANGE, AgentRun, Ending, RewardRange
from clawloop.core.errors import EpisodeUnusable
from clawloop.core.ids import EpisodeId
from clawloop.environments.playing import REWARD_FILE, packed, read_reward
from clawloop.environments.task import parse_task_id
from clawloop.environments.verifiers.loading import LoadedEnvironment
from clawloop.sandboxes.folders import abandoned_folders, owned_folder

# Requests -------------------------------------------------------------------------------------------------------------
# Passes the requests of verifiers' one client to the gateway, each with the key of its episode.
#
# verifiers keeps a client for each endpoint and key, for good. So all rollouts have this relay as their endpoint, and
# it knows them by the header that verifiers adds to each request, the id of the rollout's trace.

SESSION_HEADER = "X-Session-ID"
# Longer than the gateway holds requests while an engine restarts, as our own agent waits.
PATIENCE_SECONDS = 180.0
_LONGEST_PAUSE = 10.0
_AGAIN = (429, 502, 503, 504)
_BODY_BYTES = 32 * 2**20
# Headers not forwarded: they belong to one connection, or the relay sets them.
_OWN_HEADERS = {"authorization", "x-api-key", "host", "connection", "content-length", "transfer-encoding", "keep-alive"}


class KeyRelay:
    """
    Args:
        gateway: its URL, without a path.
        patience_seconds: how long a request is repeated while the gateway does not answer.
    """

    def __init__(self, gateway: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._gateway = gateway.rstrip("/")
        self._patience_seconds = patience_seconds
        self._keys: dict[str, str] = {}
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve on a free port of loopback while the block runs; yields the base URL."""
        app = web.Application(client_max_size=_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, access_log=None)
        # Each rollout waits for its own reply: a limit below their number would add to the time of all.
        connector = aiohttp.TCPConnector(limit=0)
        # The gateway ends a request that hangs; a rollout has its own time limit.
        timeout = aiohttp.ClientTimeout(total=None, connect=30)
        # Replies stay packed as the gateway sent them.
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            self._session = session
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                host, port = runner.addresses[0][:2]
                yield f"http://{host}:{port}"
            finally:
                await runner.cleanup()

    def admit(self, trace: str, key: str) -> None:
        """Pass on requests of this rollout from now on."""
        self._keys[trace] = key

    def dismiss(self, trace: str) -> None:
        self._keys.pop(trace, None)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        key = self._keys.get(request.headers.get(SESSION_HEADER, ""))
        if key is None:
            return web.json_response({"error": {"message": "no rollout of this worker that runs"}}, status=401)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OWN_HEADERS}
        headers["Authorization"] = f"Bearer {key}"
        body = await request.read()
        until, pause = time.monotonic() + self._patience_seconds, 0.5
        while True:
            try:
                return await self._pass_once(request, headers, body, may_repeat=time.monotonic() < until)
            except _NotNow:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _pass_once(
        self, request: web.Request, headers: dict[str, str], body: bytes, *, may_repeat: bool
    ) -> web.StreamResponse:
        """
        Raises:
            _NotNow: the gateway has no answer now, and nothing was passed back.
        """
        assert self._session is not None
        url = f"{self._gateway}{request.rel_url}"
        reply: web.StreamResponse | None = None
        try:
            async with self._session.request(request.method, url, data=body, headers=headers) as answer:
                if answer.status in _AGAIN and may_repeat:
                    raise _NotNow
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OWN_HEADERS}
                reply = web.StreamResponse(status=answer.status, headers=kept)
                await reply.prepare(request)
                async for chunk in answer.content.iter_any():
                    await reply.write(chunk)
                await reply.write_eof()
                return reply
        except (aiohttp.ClientError, TimeoutError) as error:
            if reply is not None:
                raise  # the rollout sees a reply that breaks off, and decides itself
            if may_repeat:
                raise _NotNow from error
            return web.json_response({"error": {"message": "the gateway does not answer"}}, status=503)


class _NotNow(Exception):
    """The same request may be answered later."""


# Outcomes -------------------------------------------------------------------------------------------------------------
# What became of an episode of verifiers: how it ended, its reward, and what is kept of it.
#
# verifiers scores a rollout in its own place, at its end, and so once. What is kept are numbers and names, no text of
# the conversation, which the gateway has.

_RESULT_FILE = "result.json"
_DECLARE = "give the worker --reward-range LOW HIGH"
_TOKEN_LIMITS = ("max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
# Of the model's API: wrong requests, e.g. a conversation that is too long, are the agent's own.
_AGENTS_STATUS = (400, 404, 413, 422)


def outcome_of(episode: Any, role: str, reward_range: RewardRange) -> AgentRun:
    """
    Args:
        episode: a `verifiers.v1.Episode` that has ended.
        role: the agent that the policy played.
        reward_range: of the environment.
    """
    runs = [trace for trace in episode.traces if trace.agent.name == role]
    if not runs:
        return AgentRun(Ending.INFRASTRUCTURE, f"the agent was not run: {_errors(episode)}", b"")
    ending = _ending(runs[-1])
    if ending is Ending.INFRASTRUCTURE:
        return AgentRun(ending, f"{runs[-1].stop_condition}: {_errors(runs[-1])}", b"")
    reward, why = _reward(episode, runs)
    reason = why if ending is not Ending.AGENT_ERROR else f"{runs[-1].stop_condition}: {_errors(runs[-1])}"
    return _verified(ending, reason, _kept(runs[-1], reward, why), reward_range)


def unanswered(seconds: float) -> AgentRun:
    """The run of an episode that hung."""
    why = f"it did not end in {seconds:g} s"
    kept = packed({_RESULT_FILE: json.dumps({"why": why}).encode()})
    return _verified(Ending.TRUNCATED_TIME, why, kept, UNIT_RANGE)


def kept_reward(artifact: bytes, reward_range: RewardRange) -> tuple[float | None, str]:
    """The reward in what was kept of an episode, 0 to 1, or why there is none."""
    try:
        return read_reward(artifact, reward_range, _DECLARE)
    except (KeyError, tarfile.TarError):
        return None, _kept_reason(artifact)


def _verified(ending: Ending, reason: str, kept: bytes, reward_range: RewardRange) -> AgentRun:
    """With the verdict that `kept_reward` will give of it at any time: nothing has to be asked."""
    return AgentRun(ending, reason, kept, kept_reward(kept, reward_range))


def _ending(trace: Any) -> Ending:
    stop = str(trace.stop_condition)
    if stop == "provider_error":
        status = trace.last_error.status_code if trace.last_error is not None else None
        return Ending.AGENT_ERROR if status in _AGENTS_STATUS else Ending.INFRASTRUCTURE
    if stop == "harness_error":
        return Ending.AGENT_ERROR
    if stop == "error" or stop.endswith("_error") or stop == "setup_timeout":
        return Ending.INFRASTRUCTURE
    if stop == "agent_timeout":
        return Ending.TRUNCATED_TIME
    if stop == "max_turns":
        return Ending.TRUNCATED_TURNS
    if stop in _TOKEN_LIMITS or trace.is_truncated:
        return Ending.TRUNCATED_TOKENS
    return Ending.COMPLETED


def _reward(episode: Any, runs: list[Any]) -> tuple[float | None, str]:
    if len(runs) != 1:
        return None, f"the policy played {len(runs)} times in one episode, which has one reward"
    if not episode.ok or not runs[0].ok:
        return None, f"not scored: {_errors(runs[0]) or _errors(episode)}"
    rewards = runs[0].rewards
    missing = sorted(name for name, reward in rewards.items() if reward is None)
    if missing or not rewards:
        return None, f"the environment gave no reward {', '.join(missing)}".rstrip()
    return float(runs[0].reward), ""


def _errors(of: Any) -> str:
    """Types of errors, which quote nothing."""
    return ", ".join(dict.fromkeys(error.type for error in of.errors))


def _kept(trace: Any, reward: float | None, why: str) -> bytes:
    result = {
        "why": why,
        "stop": trace.stop_condition,
        "rewards": {name: None if part is None else part.value for name, part in trace.rewards.items()},
        "metrics": dict(trace.metrics),
        "verifiers": version("verifiers"),
    }
    files = {_RESULT_FILE: json.dumps(result).encode()}
    if reward is not None:
        files[REWARD_FILE] = repr(reward).encode()
    return packed(files)


def _kept_reason(artifact: bytes) -> str:
    try:
        with tarfile.open(fileobj=io.BytesIO(artifact)) as files:
            file = files.extractfile(_RESULT_FILE)
            return str(json.loads(b"{}" if file is None else file.read()).get("why")) or "no reward"
    except (KeyError, ValueError, tarfile.TarError):
        return "what was kept of the episode cannot be read"


# Leftovers ------------------------------------------------------------------------------------------------------------
# What a worker of verifiers leaves on this machine when it is killed: working folders, and programs of agents.
#
# A worker that ends by itself leaves none, as verifiers removes them. Each notes its rollouts in a locked folder, and
# names the folder in a variable that its programs inherit; so the next worker finds what belongs to a dead one.

VARIABLE = "CLAWLOOP_ROLLOUTS"
_PREFIX = "clawloop-rollouts-"
# Where the runtime `subprocess` of verifiers 0.4 has a folder for each rollout, by the id of its trace.
WORKING_FOLDERS = Path(".cache") / "verifiers" / "runtimes" / "subprocess"


class RolloutNotes:
    """The rollouts that this process runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    @contextmanager
    def open(cls, root: Path | None = None) -> Iterator[RolloutNotes]:
        """Notes in a new folder, locked until the end of the block, when it is removed; programs inherit its name.

        Args:
            root: an existing folder; None: the system's for temporary files.
        """
        with owned_folder(root or Path(tempfile.gettempdir()), _PREFIX) as folder:
            (folder / "rollouts").mkdir()
            os.environ[VARIABLE] = str(folder)
            try:
                yield cls(folder)
            finally:
                os.environ.pop(VARIABLE, None)

    def begun(self, trace: str) -> None:
        (self._folder / "rollouts" / trace).touch()

    def ended(self, trace: str) -> None:
        (self._folder / "rollouts" / trace).unlink(missing_ok=True)


def sweep_rollouts(root: Path | None = None, home: Path | None = None) -> int:
    """End programs of dead workers and remove their rollouts' folders; the number of workers."""
    swept = 0
    for folder in abandoned_folders(root or Path(tempfile.gettempdir()), _PREFIX):
        _end_programs(folder)
        for note in (folder / "rollouts").glob("*"):
            shutil.rmtree((home or Path.home()) / WORKING_FOLDERS / note.name, ignore_errors=True)
        swept += 1
    return swept


def _end_programs(folder: Path) -> None:
    """Kill what still runs with this folder's name in its environment."""
    named = f"{VARIABLE}={folder}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        # It may end meanwhile, or be another user's.
        with suppress(OSError):
            if named in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)


# Episodes -------------------------------------------------------------------------------------------------------------
# Runs episodes of one environment of verifiers, which owns agent, tools, boxes and scoring.


class VerifiersRunner:
    """Satisfies `clawloop.core.episodes.running.EpisodeRunner`; use `serving`.

    Task `train-N` is the N-th of the training tasks, and after the last the first again; `test-N` likewise.
    """

    def __init__(self, loaded: LoadedEnvironment, relay: KeyRelay, context: Any, notes: RolloutNotes) -> None:
        self._loaded = loaded
        self._relay = relay
        self._context = context
        self._notes = notes

    @classmethod
    @asynccontextmanager
    async def serving(cls, loaded: LoadedEnvironment, relay: KeyRelay) -> AsyncIterator[VerifiersRunner]:
        """A runner, while the environment's shared servers and the relay to the gateway run."""
        import verifiers.v1 as vf

        with RolloutNotes.open() as notes:
            async with relay.serving() as url, loaded.env.serving():
                # The key is the relay's matter.
                client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var="CLAWLOOP_EPISODE")
                context = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
                yield cls(loaded, relay, context, notes)

    async def require_usable(self, environment: str, task_id: str) -> None:
        """Accept every task: verifiers answers for what it loads."""

    async def run_agent(self, environment: str, task_id: str, episode: EpisodeId, key: str) -> AgentRun:
        [slot] = self._loaded.env.slots(self._task(task_id))
        traces: list[str] = []

        def begun(trace: Any) -> None:
            traces.append(trace.id)
            self._notes.begun(trace.id)
            self._relay.admit(trace.id, key)

        try:
            async with asyncio.timeout(self._loaded.seconds):
                done = await self._loaded.env.run_slot(slot, self._context, on_trace=begun)
        except TimeoutError:
            return unanswered(self._loaded.seconds)
        finally:
            for trace in traces:
                self._relay.dismiss(trace)
                self._notes.ended(trace)
        return outcome_of(done, self._loaded.role, self._loaded.reward_range)

    async def verify(
        self, environment: str, task_id: str, episode: EpisodeId, artifact: bytes
    ) -> tuple[float | None, str]:
        """The reward that verifiers gave at the episode's end."""
        return kept_reward(artifact, self._loaded.reward_range)

    def _task(self, task_id: str) -> Any:
        split, number = parse_task_id(task_id)
        tasks = self._loaded.tasks[split]
        if not tasks:
            raise EpisodeUnusable(f"the environment has no {split} task")
        return tasks[number % len(tasks)]
