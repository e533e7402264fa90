"""Requests of commands to a running gateway, which alone can do what they ask for."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

from clawloop.app.cli.terminal import Data, fail, running_settings
from clawloop.core.errors import SetupError

Url = Annotated[str | None, typer.Option(help="The gateway's address; by default that of `up` on the data folder.")]


def gateway_address(url: str | None, data: Data) -> str:
    """`--url` without `/v1`, else the address of the data folder's `clawloop up`."""
    from clawloop.app.processes.endpoints import gateway_url

    try:
        return (url or gateway_url(running_settings(data))).rstrip("/").removesuffix("/v1")
    except SetupError as error:
        fail(str(error))


def post(address: str, path: str, body: Any, key: str, seconds: float) -> Any:
    """The gateway's answer; prints its error and exits if it refuses.

    Args:
        address: the gateway's.
        seconds: it may be silent for so long.
    """
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}{path}", json.dumps(body).encode(), headers)
    return _answer(address, request, seconds)


def require_gateway(address: str, key: str) -> None:
    """Print one line and exit unless a gateway answers there and takes the key as an admin's."""
    request = urllib.request.Request(f"{address}/admin/v1/policies", headers={"Authorization": f"Bearer {key}"})
    _answer(address, request, 30, "give --key one with the scope admin (`clawloop key create --scope admin`)")


def kept_key(data: Data, scope: str) -> str:
    """The key of this scope that `clawloop up` made on this data folder."""
    from clawloop.app.local.keys_file import read_keys

    path = running_settings(data).data / "keys.json"
    key = read_keys(path).get(scope)
    if key is None:
        fail(f"{path} has no {scope} key: give --key")
    return key


def _answer(address: str, request: urllib.request.Request, seconds: float, remedy: str | None = None) -> Any:
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = _message(error.read()) or f"the gateway answered {error.code}"
        fail(said if remedy is None else f"{said.rstrip('.')}: {remedy}")
    except (OSError, ValueError) as error:
        fail(f"no gateway answers at {address} ({error}): start `clawloop up`, or give --url")


def _message(raw: bytes) -> str | None:
    """The message of an error in OpenAI's shape or as problem+json; None if it has none."""
    try:
        answer = json.loads(raw)
        message = answer["error"]["message"] if "error" in answer else answer["detail"]
    except (ValueError, LookupError, TypeError):
        return None
    return message if isinstance(message, str) else None
