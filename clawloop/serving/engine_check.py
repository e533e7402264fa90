"""Check, before an engine gets requests, that it serves the model of its policy and its trainer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import aiohttp

from clawloop.core.errors import EngineUnavailable, SetupError
from clawloop.serving.endpoints import bearer

# A person waits at the terminal, and an engine under load answers after seconds.
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)


async def require_model(url: str, base_models: Collection[str], vocab: int | None, secret: str | None = None) -> None:
    """
    Args:
        base_models: of the policies; none: any model will do.
        vocab: token ids of the trainer's model; None: not compared.
        secret: sent as Bearer; None: none.

    Raises:
        SetupError: the engine serves another model.
        EngineUnavailable: it does not answer.
    """
    async with aiohttp.ClientSession(timeout=_TIMEOUT, headers=bearer(secret)) as session:
        try:
            served = await _served(session, url)
            wanted = [name for name in served if name in base_models] or (served if not base_models else [])
            if not wanted:
                raise SetupError(
                    f"engine {url} serves {' and '.join(served) or 'no model'}, the policies are of "
                    f"{' and '.join(sorted(base_models))}: give an engine of that model, or if it is the same one, "
                    "start it with that --served-model-name"
                )
            if vocab is not None:
                await _require_vocabulary(session, url, wanted[0], vocab)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise EngineUnavailable(f"engine {url} does not answer") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SetupError(f"engine {url} does not answer like vLLM: correct the address") from error


async def answers_strangers(url: str) -> bool:
    """True if an engine lists its models to a request without a secret; False also if it does not answer."""
    try:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session, session.get(f"{url}/v1/models") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
        return False


async def _served(session: aiohttp.ClientSession, url: str) -> list[str]:
    """The names under which it serves base models."""
    async with session.get(f"{url}/v1/models") as answer:
        answer.raise_for_status()
        models = (await answer.json(content_type=None))["data"]
        return [str(model["id"]) for model in models if model.get("parent") is None]


async def _require_vocabulary(session: aiohttp.ClientSession, url: str, model: str, vocab: int) -> None:
    """Check that the engine's vocabulary has the expected size: vLLM refuses the first id beyond it."""
    last, beyond = [await _reads(session, url, model, token) for token in (vocab - 1, vocab)]
    if not last or beyond:
        size = "fewer" if not last else "more"
        raise SetupError(
            f"engine {url} serves a model with {size} token ids than the trainer's {vocab}: serve the model that "
            "CLAWLOOP_MODEL names"
        )


async def _reads(session: aiohttp.ClientSession, url: str, model: str, token: int) -> bool:
    body: dict[str, Any] = {"model": model, "prompt": [token], "max_tokens": 1}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status not in (200, 400):
            answer.raise_for_status()
        return answer.status == 200
