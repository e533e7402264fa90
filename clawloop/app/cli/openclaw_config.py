"""`clawloop openclaw-config`: OpenClaw's configuration for this gateway, alone or merged into a person's own."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import typer

from clawloop.app.cli.feedback import Key
from clawloop.app.cli.gateway_request import Url, gateway_address, kept_key
from clawloop.app.cli.terminal import Data, fail, running_settings
from clawloop.core.errors import SetupError

_NO_COST = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
_COMPAT = {"sendSessionAffinityHeaders": True, "supportsPromptCacheKey": True}
_SIDE = "clawloop/policy-side"
_CONTEXT = 32768  # of Qwen3, and of `up` unless another is asked for
_LONGEST_REPLY = 8192


def openclaw_config(
    merge: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Your openclaw.json; it is read, never written.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the engine's context; by default of the engine that `up` started."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="The longest reply; by default a quarter of the context, at most 8192.")
    ] = None,
    url: Url = None,
    key: Key = None,
    data: Data = None,
) -> None:
    """Print OpenClaw's configuration with this gateway as its model, for `openclaw.json`."""
    address = gateway_address(url, data)
    context = context or _context_of(data)
    max_tokens = max_tokens or max(1, min(_LONGEST_REPLY, context // 4))
    if max_tokens >= context:
        raise typer.BadParameter(f"it leaves no room for a prompt in {context} tokens", param_hint="--max-tokens")
    made = configuration(address, key or kept_key(data, "chat"), context, max_tokens)
    if merge is not None:
        made = merged(_read(merge), made, address)
    typer.echo(json.dumps(made, indent=2, ensure_ascii=False))


def _context_of(data: Data) -> int:
    from clawloop.app.processes.endpoints import read_runtime_file

    try:
        addresses = read_runtime_file(running_settings(data).data)
    except SetupError as error:
        fail(str(error))
    return (None if addresses is None else addresses.context_tokens) or _CONTEXT


def configuration(address: str, key: str, context: int, max_tokens: int) -> dict[str, Any]:
    """OpenClaw's configuration, as in deploy/openclaw/openclaw.json: side tasks go to a model of their own."""
    shared = {"reasoning": False, "input": ["text"], "cost": _NO_COST}
    limits = {"contextWindow": context, "maxTokens": max_tokens}
    main = {"id": "policy", "name": "Clawloop", **shared, **limits, "compat": _COMPAT}
    side = {"id": "policy-side", "name": "Clawloop, side tasks", **shared, **limits}
    side |= {"headers": {"X-Turn-Type": "side"}, "compat": _COMPAT}
    provider = {"baseUrl": f"{address}/v1", "apiKey": key, "api": "openai-completions", "timeoutSeconds": 1800}
    return {
        "models": {"mode": "merge", "providers": {"clawloop": {**provider, "models": [main, side]}}},
        "agents": {
            "defaults": {
                "model": {"primary": "clawloop/policy"},
                "utilityModel": _SIDE,
                "heartbeat": {"model": _SIDE},
                "compaction": {"model": _SIDE, "memoryFlush": {"model": _SIDE}},
            }
        },
    }


def merged(own: dict[str, Any], made: dict[str, Any], address: str) -> dict[str, Any]:
    """A person's own configuration with ours over it.

    A provider of theirs that already leads to this gateway goes: under some names, `qwen` among them, the current
    OpenClaw looks for a plugin of that name.
    """
    result = deepcopy(own)
    models = result.get("models")
    providers = models.get("providers") if isinstance(models, dict) else None
    if isinstance(providers, dict):
        for name, provider in list(providers.items()):
            base = provider.get("baseUrl") if isinstance(provider, dict) else None
            if isinstance(base, str) and base.rstrip("/").removesuffix("/v1") == address:
                del providers[name]
    _put(result, made)
    return result


def _put(target: dict[str, Any], source: dict[str, Any]) -> None:
    for name, value in source.items():
        if isinstance(value, dict) and isinstance(target.get(name), dict):
            _put(target[name], value)
        else:
            target[name] = value


def _read(path: Path) -> dict[str, Any]:
    try:
        own = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(f"{path} cannot be read as JSON ({error}); without --merge the part to put in is printed alone")
    if not isinstance(own, dict):
        fail(f"{path} is no JSON object")
    return own
