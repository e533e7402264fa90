"""Asks a version of a policy for a chat completion, on engines that have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from clawloop.core.contracts.serving import Directory, Engine
from clawloop.core.errors import EngineRejected, EngineUnavailable
from clawloop.core.ids import version_name
from clawloop.serving.endpoints import Asking, Endpoint, JsonClient, NoReply
from clawloop.serving.engine_secret import Secret

# 404: the engine restarted and lacks the version; its agent loads it again. 401: another engine may have the secret.
_RETRYABLE = frozenset({401, 404, 408, 409, 425, 429})


class VersionClient(Asking):
    """Base of what asks versions. Use as an async context manager.

    Args:
        directory: current policies and engines.
        secret: the engines'.
        seconds: how long one answer may take.
    """

    def __init__(self, directory: Callable[[], Directory], secret: Secret, seconds: float) -> None:
        super().__init__(JsonClient(seconds))
        self._directory = directory
        self._secret = secret

    def _engines(self, policy: str, version: int) -> list[tuple[Engine, Endpoint]]:
        """The engines that have the version and are not drained, each with its address."""
        now = self._directory()
        base = next((each.base_model for each in now.policies if each.id == policy), None)
        return [
            (engine, Endpoint(engine.url, version_name(policy, version, base), self._secret()))
            for engine in now.engines
            if base is not None and not engine.draining
            if version == 0 or version in engine.versions.get(policy, frozenset())
        ]

    async def _completion(self, endpoints: Sequence[Endpoint], body: dict[str, Any], asked: str) -> dict[str, Any]:
        """The body of the answer to a chat request; empty if it is no JSON object, or too large.

        Args:
            asked: what is asked, for messages.

        Raises:
            EngineUnavailable: no engine answered; retry later.
            EngineRejected: the engine will never take this request.
        """
        try:
            reply = await self._client.post(endpoints, "/v1/chat/completions", body)
        except NoReply as error:
            raise EngineUnavailable(f"no answer to {asked}: {error}") from error
        if reply.status >= 500 or reply.status in _RETRYABLE:
            raise EngineUnavailable(f"an engine answered {reply.status} to {asked}")
        if reply.status != 200:
            raise EngineRejected(reply.status, {"message": f"the engine refused {asked}"})
        return reply.body or {}
