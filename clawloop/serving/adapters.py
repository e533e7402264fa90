"""Loads, probes, unloads and counts the adapters of one vLLM engine.

A new version is a new adapter name and a new directory. Nothing is ever loaded in place: that would mix weights in
running requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from prometheus_client.parser import text_string_to_metric_families

from clawloop.core.adapters.directory import check_version
from clawloop.core.contracts.training import VersionRef
from clawloop.core.errors import AdapterUnreadable, AdapterUnusable, EngineRejected, EngineUnavailable
from clawloop.serving.endpoints import JUDGE_BEHIND, bearer, connector, place_in_queue
from clawloop.serving.engine_secret import Secret, no_secret

# The agent runs on the engine's machine.
CONNECT_SECONDS = 2.0
# Milliseconds on an idle engine; one that reads a long prompt on a CPU answers after seconds.
QUERY_SECONDS = 10.0
# An adapter of a large model from a cold disk. Training waits as long for a request that got lost; a load that ends
# later is found by the next attempt.
LOAD_SECONDS = 30.0
# A probe queues behind what is running, which may be much on a machine without a GPU.
PROBE_SECONDS = 60.0
# vLLM updates the metric at every token of a running request; an older value may count a request that was aborted.
STALE_SECONDS = 5.0
# Every vocabulary has a token with this id.
_PROBE_TOKEN = 1
_LORA_METRIC = "vllm:lora_requests_info"
# The engine has another secret by now, or too much to do.
_RETRYABLE = frozenset({401, 408, 429})


@dataclass(frozen=True, slots=True)
class _LoraUsage:
    """vLLM's metric of the adapters in use.

    Args:
        names: adapters with requests.
        slots: how many adapters may have requests at once.
        updated_at: in seconds since 1970.
    """

    names: frozenset[str]
    slots: int
    updated_at: float


class VllmControl:
    """Satisfies `activities.serving.engines.EngineControl`. Use as an async context manager.

    Args:
        url: of the engine.
        adapters: the folder that `VersionRef.path` is relative to; the engine must see it at the same path.
        secret: sent as Bearer.
    """

    def __init__(self, url: str, adapters: Path, secret: Secret = no_secret) -> None:
        self._url = url
        self._secret = secret
        self._adapters = adapters.resolve()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> VllmControl:
        self._session = aiohttp.ClientSession(connector=connector())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def load(self, version: VersionRef, name: str) -> None:
        """Load a version as `name`, and sample one token from it. A version that is loaded already is only probed.

        Raises:
            EngineRejected: the engine cannot load it.
            EngineUnavailable
            AdapterUnusable: the files are not those the version was committed with.
            AdapterUnreadable
        """
        path = self._adapters / version.path
        await asyncio.to_thread(check_version, path, version.sha256)  # half a second for an adapter of 200 MB
        loaded_path = (await self._roots()).get(name)
        if loaded_path is not None and loaded_path != str(path):
            await self.unload(name)  # the name stands for another directory
            loaded_path = None
        if loaded_path is None:
            try:
                names = {"lora_name": name, "lora_path": str(path)}
                await self._post("/v1/load_lora_adapter", names, LOAD_SECONDS, of_version=True)
            except EngineRejected as error:
                # vLLM refuses a name that is loaded, as when an earlier attempt's slow load has just ended.
                if (await self._roots()).get(name) != str(path):
                    raise EngineRejected(error.status, _with_remedy(error.error)) from error
            await self._check_loaded(version, name, path)
        await self._probe(name)

    async def _check_loaded(self, version: VersionRef, name: str, path: Path) -> None:
        """Unload again what is not this version: another name's folder, or files that changed while they were read.

        Raises:
            AdapterUnusable, AdapterUnreadable, EngineRejected, EngineUnavailable
        """
        try:
            root = (await self._roots()).get(name)
            if root != str(path):
                raise EngineRejected(200, {"message": f"the engine says that {name} is {root}, not {path}"})
            await asyncio.to_thread(check_version, path, version.sha256)
        except (EngineRejected, AdapterUnusable, AdapterUnreadable):
            await self.unload(name)
            raise

    async def unload(self, name: str) -> None:
        """Unload an adapter; running requests keep it until they end. Idempotent.

        Raises:
            EngineRejected, EngineUnavailable
        """
        try:
            await self._post("/v1/unload_lora_adapter", {"lora_name": name}, QUERY_SECONDS)
        except EngineRejected as error:
            if error.status != 404:
                raise

    async def names(self) -> frozenset[str]:
        """The adapters the engine has loaded.

        Raises:
            EngineRejected, EngineUnavailable
        """
        return frozenset(await self._roots())

    async def running(self) -> frozenset[str]:
        """The adapters that have requests, running or waiting.

        Raises:
            EngineRejected, EngineUnavailable
        """
        usage = await self._lora_usage()
        # Also a value from the future, left by a clock that was set back: it says nothing about now.
        if usage is not None and usage.names and abs(time.time() - usage.updated_at) > STALE_SECONDS:
            await self._probe(None)  # any request updates the metric
            usage = await self._lora_usage()
        return frozenset() if usage is None else usage.names

    async def slots(self) -> int:
        """Number of adapters that may have requests running at once.

        Raises:
            EngineRejected, EngineUnavailable
        """
        if (usage := await self._lora_usage()) is None:
            await self._probe(None)
            usage = await self._lora_usage()
        return 1 if usage is None else usage.slots

    async def healthy(self) -> bool:
        """True if the engine is healthy; False if it cannot be reached or reports that it is not.

        Raises:
            EngineUnavailable: no answer in time, as from an engine that is busy or hangs.
        """
        try:
            async with self._client.get(f"{self._url}/health", timeout=_limit(QUERY_SECONDS)) as answer:
                return answer.status == 200
        except TimeoutError as error:
            raise EngineUnavailable(f"no answer within {QUERY_SECONDS:.0f} s") from error
        except (aiohttp.ClientError, ConnectionError):
            return False

    async def _probe(self, name: str | None) -> None:
        """Sample one token from this adapter, or from the base model."""
        model = name
        if model is None:
            model = next(iter(await self._models(adapters=False)))
        body = {"model": model, "prompt": [_PROBE_TOKEN], "max_tokens": 1, **place_in_queue(JUDGE_BEHIND)}
        await self._post("/v1/completions", body, PROBE_SECONDS, of_version=name is not None)

    async def _roots(self) -> dict[str, str]:
        """The directory of each loaded adapter, by name."""
        return await self._models(adapters=True)

    async def _models(self, *, adapters: bool) -> dict[str, str]:
        body = await self._request("GET", "/v1/models", None, QUERY_SECONDS)
        try:
            models = orjson.loads(body)["data"]
            return {
                str(model["id"]): str(model["root"]) for model in models if (model["parent"] is not None) == adapters
            }
        except (orjson.JSONDecodeError, LookupError, TypeError) as error:
            raise EngineRejected(200, {"message": "the engine's list of models cannot be read"}) from error

    async def _lora_usage(self) -> _LoraUsage | None:
        """The newest value of vLLM's metric; None before its first request.

        vLLM keeps one series for each set of adapters it ever ran, whose value is the time when it last did.
        """
        text = (await self._request("GET", "/metrics", None, QUERY_SECONDS)).decode()
        lines = [line for line in text.splitlines() if line.startswith(_LORA_METRIC)]
        samples = [sample for family in text_string_to_metric_families("\n".join(lines)) for sample in family.samples]
        if not samples:
            return None
        # A series from before the clock was set back is updated by no request, and would seem newest for that long.
        by_now = [sample for sample in samples if sample.value <= time.time() + STALE_SECONDS]
        newest = max(by_now or samples, key=lambda sample: sample.value)
        labels = ("running_lora_adapters", "waiting_lora_adapters")
        names = frozenset(name for label in labels for name in newest.labels[label].split(",") if name)
        return _LoraUsage(names, int(newest.labels["max_lora"]), newest.value)

    async def _post(self, path: str, body: dict[str, Any], seconds: float, *, of_version: bool = False) -> None:
        await self._request("POST", path, body, seconds, of_version=of_version)

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float, *, of_version: bool = False
    ) -> bytes:
        """
        Args:
            of_version: the request is about one version, so that a 500 may be its fault, and not the engine's.
        """
        data = None if body is None else orjson.dumps(body)
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            async with self._client.request(
                method, f"{self._url}{path}", data=data, headers=headers, timeout=_limit(seconds)
            ) as answer:
                content = await answer.read()
                if answer.status in _RETRYABLE or (answer.status >= 500 and not of_version):
                    raise EngineUnavailable(f"the engine answered {answer.status} to {path}")
                if answer.status != 200:
                    raise EngineRejected(answer.status, {"message": _error_message(content)})
                return content
        except TimeoutError as error:
            raise EngineUnavailable(f"no answer to {path} within {seconds:.0f} s") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineUnavailable(f"the engine cannot be reached ({type(error).__name__})") from error

    @property
    def _client(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside its context"
        self._session.headers.update(bearer(self._secret()))
        return self._session


def _limit(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)


def _with_remedy(error: Mapping[str, Any]) -> dict[str, Any]:
    message = str(error.get("message", ""))
    if "max_lora_rank" in message:
        remedy = "Start the engine with a larger --max-lora-rank, or set a recipe with a smaller train.lora.rank."
        message = f"{message.rstrip('. ')}. {remedy}"
    return {**error, "message": message}


def _error_message(content: bytes) -> str:
    """The engine's own message, which cannot quote a conversation: none of these requests holds one."""
    try:
        return str(orjson.loads(content)["error"]["message"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return "no reason given"
