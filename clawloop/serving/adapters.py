"""Adapters of one vLLM: loaded, tried, unloaded, counted. A new version is a new name and a new directory.

Knows nothing about which versions there should be. Never loads in place: that mixes weights in running requests.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from clawloop.adapters.digest import check_version
from clawloop.contracts.training import VersionRef
from clawloop.errors import EngineRejected, EngineUnavailable

# The agent stands beside its engine.
CONNECT_SECONDS = 2.0
# Milliseconds on an idle engine; one that reads a long prompt on a CPU takes seconds to look up.
QUESTION_SECONDS = 10.0
# An adapter of a large model from a cold disk, and a probe that queues behind what is running.
LOAD_SECONDS = 60.0
# A running request makes vLLM write its metrics at every token; older ones may tell of a request that was aborted.
STALE_SECONDS = 5.0
# Any vocabulary has a token of this number.
_PROBE_TOKEN = 1
_RUNNING = "vllm:lora_requests_info"


@dataclass(frozen=True, slots=True)
class _Told:
    """
    Args:
        names: adapters with requests.
        slots: adapters that fit at once.
        at: when it was told, in seconds since 1970.
    """

    names: frozenset[str]
    slots: int
    at: float


class VllmControl:
    """Satisfies `activities.training.ports.EngineControl`. Use as an async context manager.

    Args:
        url: of the engine.
        adapters: the folder in which `VersionRef.path` lies; the engine must see it under the same name.
    """

    def __init__(self, url: str, adapters: Path) -> None:
        self._url = url
        self._adapters = adapters.resolve()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> VllmControl:
        # uvicorn closes an idle connection after 5 s; using that one would look like a dead engine.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=3))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def load(self, version: VersionRef, name: str) -> None:
        """Load a version under `name`, and see that it answers one token; what is loaded already is tried again.

        Raises:
            EngineRejected: the engine cannot load it.
            EngineUnavailable
            AdapterUnusable: the directory does not hold what the ledger says.
        """
        path = self._adapters / version.path
        await asyncio.to_thread(check_version, path, version.sha256)  # half a second for an adapter of 200 MB
        known = (await self._roots()).get(name)
        if known is not None and known != str(path):
            await self.unload(name)  # somebody gave another directory this name
            known = None
        if known is None:
            await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, LOAD_SECONDS)
        await self._try(name)

    async def unload(self, name: str) -> None:
        """Requests that run keep it until they end; one that it does not have is no error.

        Raises:
            EngineRejected, EngineUnavailable
        """
        try:
            await self._post("/v1/unload_lora_adapter", {"lora_name": name}, QUESTION_SECONDS)
        except EngineRejected as error:
            if error.status != 404:
                raise

    async def names(self) -> frozenset[str]:
        """The adapters it has.

        Raises:
            EngineRejected, EngineUnavailable
        """
        return frozenset(await self._roots())

    async def running(self) -> frozenset[str]:
        """The adapters that have requests, running or waiting.

        Raises:
            EngineRejected, EngineUnavailable
        """
        told = await self._last_told()
        if told is not None and told.names and time.time() - told.at > STALE_SECONDS:
            await self._try(None)  # whatever is asked makes it tell anew
            told = await self._last_told()
        return frozenset() if told is None else told.names

    async def slots(self) -> int:
        """How many adapters may have requests running at once.

        Raises:
            EngineRejected, EngineUnavailable
        """
        if (told := await self._last_told()) is None:
            await self._try(None)
            told = await self._last_told()
        return 1 if told is None else told.slots

    async def healthy(self) -> bool:
        """Whether it answers; False when it cannot be reached or says that it is ill.

        Raises:
            EngineUnavailable: it is silent, which a busy engine may be.
        """
        try:
            async with self._client.get(f"{self._url}/health", timeout=_limit(QUESTION_SECONDS)) as answer:
                return answer.status == 200
        except TimeoutError as error:
            raise EngineUnavailable(f"no answer within {QUESTION_SECONDS:.0f} s") from error
        except (aiohttp.ClientError, ConnectionError):
            return False

    async def _try(self, name: str | None) -> None:
        """One token from this adapter, or from the base model."""
        model = name
        if model is None:
            model = next(iter(await self._models(adapters=False)))
        await self._post("/v1/completions", {"model": model, "prompt": [_PROBE_TOKEN], "max_tokens": 1}, LOAD_SECONDS)

    async def _roots(self) -> dict[str, str]:
        """Each adapter's name and directory."""
        return await self._models(adapters=True)

    async def _models(self, *, adapters: bool) -> dict[str, str]:
        body = await self._ask("GET", "/v1/models", None, QUESTION_SECONDS)
        try:
            models = orjson.loads(body)["data"]
            return {str(one["id"]): str(one["root"]) for one in models if (one["parent"] is not None) == adapters}
        except (orjson.JSONDecodeError, LookupError, TypeError) as error:
            raise EngineRejected(200, {"message": "its list of models cannot be read"}) from error

    async def _last_told(self) -> _Told | None:
        """What vLLM told last of requests to adapters; None before its first request.

        It keeps one series for each set of adapters it ever ran, whose value is when it last did.
        """
        text = (await self._ask("GET", "/metrics", None, QUESTION_SECONDS)).decode()
        told = [line for line in text.splitlines() if line.startswith(_RUNNING)]
        samples = [sample for family in text_string_to_metric_families("\n".join(told)) for sample in family.samples]
        if not samples:
            return None
        newest = max(samples, key=lambda sample: sample.value)
        labels = ("running_lora_adapters", "waiting_lora_adapters")
        names = frozenset(name for label in labels for name in newest.labels[label].split(",") if name)
        return _Told(names, int(newest.labels["max_lora"]), newest.value)

    async def _post(self, path: str, body: dict[str, Any], seconds: float) -> None:
        await self._ask("POST", path, body, seconds)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None, seconds: float) -> bytes:
        content = None if body is None else orjson.dumps(body)
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            async with self._client.request(
                method, f"{self._url}{path}", data=content, headers=headers, timeout=_limit(seconds)
            ) as answer:
                said = await answer.read()
                if answer.status != 200:
                    raise EngineRejected(answer.status, {"message": _message(said)})
                return said
        except TimeoutError as error:
            raise EngineUnavailable(f"no answer to {path} within {seconds:.0f} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineUnavailable(f"it cannot be reached ({type(error).__name__})") from error

    @property
    def _client(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside its context"
        return self._session


def _limit(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)


def _message(said: bytes) -> str:
    """The engine's own words; it is asked nothing that a conversation is in."""
    try:
        return str(orjson.loads(said)["error"]["message"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return "no reason given"
