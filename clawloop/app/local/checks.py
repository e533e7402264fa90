"""Checks of machine and settings before anything starts: a wrong setting is a SetupError of one line with a remedy."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import aiohttp
import psutil
import psycopg

from clawloop.app.local.services.temporal_server import NAMESPACE
from clawloop.app.processes.endpoints import LOCK_NAME
from clawloop.core.errors import ModelUnsupported, SetupError
from clawloop.core.families.chat_format import ChatOptions, read_chat_format
from clawloop.core.families.template import behind_reply, read_template
from clawloop.serving.endpoints import bearer
from clawloop.training.model.checkpoint import end_tokens
from db.database import driver_url, postgres_message

# A new PostgreSQL takes 60 MiB, four logs at most 80, an adapter of a 4B model 130: enough for the first days.
NEEDED_BYTES = 2**30
_SIZES = ("num_attention_heads", "num_hidden_layers", "hidden_size", "max_position_embeddings")
# A person waits at the terminal; a service that answers later than this counts as unavailable.
_ANSWER_SECONDS = 10.0


@contextmanager
def lock_data_folder(data: Path) -> Iterator[None]:
    """Lock a data folder for this process until the end of the block or of the process."""
    with lock_file(data / LOCK_NAME, f"clawloop up already runs on {data}"):
        yield


@contextmanager
def lock_file(path: Path, locked_message: str, wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Lock a file, created if missing, that contains the id of the process that locks it.

    Args:
        locked_message: begins the error message when another process has locked it.
        wait: gets that message and the process, once, before the lock is waited for; None: an error instead.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise SetupError(f"cannot write to {path.parent}: {error.strerror}; choose another folder: --data") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            locked = f"{locked_message} (process {file.read().strip() or 'unknown'})"
            if wait is None:
                raise SetupError(f"{locked}: stop it first, or choose another folder: --data") from None
            wait(locked)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        with suppress(OSError):  # a full disk: others do not learn the process, and `model remove` can make room
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        yield


def require_folder(folder: Path) -> None:
    """Create a data folder if it is missing, and check that it is writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SetupError(f"cannot write to {folder}: {error.strerror}; choose another folder: --data") from error


def require_disk(folder: Path, needed_bytes: int = NEEDED_BYTES) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise SetupError(
            f"{needed_bytes // 2**20} MiB of free disk are needed in {folder}, {free // 2**20} MiB are free:"
            " make room or choose another folder: --data"
        )


def choose_port(part: str, host: str, port: int, option: str) -> int:
    """The port, checked to be free to listen on; for 0 any free one.

    Args:
        part: for error messages.
        option: the command-line option that sets the port, for error messages.
    """
    if port == 0:
        return _free_port(host)
    with bound_socket(part, host, port, option):
        return port


def bound_socket(part: str, host: str, port: int, option: str) -> socket.socket:
    """A socket bound to an address; for port 0 to any free one. It does not listen yet."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError) as error:
        raise SetupError(f"{host}:{port} is not an address to listen on for {part}: {error}") from error
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except PermissionError:
        bound.close()
        raise SetupError(f"port {port} for {part} needs root: choose one above 1023 with {option}") from None
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise SetupError(
                f"port {port} for {part} is in use{_by_process(port)}: stop it, or choose another port with"
                f" {option} (0 takes a free one)"
            ) from None
        raise SetupError(f"cannot listen on {host}:{port} for {part}: {error.strerror}") from error
    return bound


def require_model(folder: Path, chat: ChatOptions | None = None) -> None:
    """Check that a folder contains a model that can be served.

    Args:
        chat: what the operator sets for chats.
    """
    require_description(folder, chat)
    if not any(folder.glob("*.safetensors")):
        raise SetupError(f"{folder} has no weights (*.safetensors): download the model again, completely")


def require_description(folder: Path, chat: ChatOptions | None = None) -> None:
    """Check all of a model folder but its weights.

    Args:
        chat: what the operator sets for chats.
    """
    remedy = "give the folder of a model in Hugging Face format: --model PATH"
    if not folder.is_dir():
        raise SetupError(f"there is no model folder {folder}: {remedy}")
    config = folder / "config.json"
    if not config.is_file():
        raise SetupError(f"{folder} contains no model, config.json is missing: {remedy}")
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
        architecture = content["architectures"][0]
        decoder = {**content, **content.get("text_config", {})}
        sizes = [decoder[name] for name in _SIZES]
        readable = all(isinstance(size, int) and size > 0 for size in sizes)
    except (ValueError, LookupError, TypeError):
        readable, content, architecture = False, {}, ""
    if not readable:
        raise SetupError(f"{config} does not describe a language model: {remedy}")
    if not architecture.endswith(("ForCausalLM", "ForConditionalGeneration")):
        raise SetupError(f"{folder} is a {architecture}, which writes no text: choose a chat model")
    if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file():
        raise SetupError(f"{folder} has no tokenizer (tokenizer.json): download the model again, completely")
    read_chat_format(folder, chat)


def why_endless(folder: Path, chat: ChatOptions | None = None) -> str | None:
    """Why the model's replies may not end, as those of a base model; None if nothing speaks for it.

    Base models of some families, as of Qwen, come with the chat template of the tuned ones, and end at other tokens.

    Args:
        chat: what the operator sets for chats.
    """
    named, eos = _special_tokens(folder)
    try:
        behind = behind_reply(read_template(folder, None if chat is None else chat.template), eos) or ""
    except SetupError:
        return None  # `require_description` says it
    try:
        ends = end_tokens(folder)
    except ModelUnsupported:
        ends = frozenset()
    written = sorted((behind.index(token), token) for token in named if token in behind)
    # An engine ends at the tokenizer's own end as well.
    if not written or any(token == eos or named[token] in ends for _, token in written):
        return None
    _, end = written[0]
    return (
        f"{folder} looks like a base model, whose replies may not end: its chat template ends them by {end}, which is"
        " none of its end tokens: choose the instruction-tuned model of its family; if this one was tuned for chats,"
        f" add {named[end]} to eos_token_id in its generation_config.json"
    )


def _special_tokens(folder: Path) -> tuple[dict[str, int], str]:
    """Ids of special tokens by their text, and the one that the tokenizer calls its end; empty where unknown."""
    try:
        added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("added_tokens") or []
        special = {token["content"]: token["id"] for token in added if token.get("special")}
        eos = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
        return special, eos["content"] if isinstance(eos, dict) else eos or ""
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}, ""


async def require_database(url: str) -> None:
    """Check that the PostgreSQL at `url` accepts a connection. Error messages never contain the password."""
    libpq_url = driver_url(url).replace("+psycopg://", "://", 1)
    try:
        connection = await psycopg.AsyncConnection.connect(libpq_url, connect_timeout=int(_ANSWER_SECONDS))
        await connection.close()
    except psycopg.Error as error:
        raise SetupError(
            f"DATABASE_URL: {postgres_message(error)}: start that PostgreSQL or correct the URL;"
            " unset it to start one here"
        ) from None


async def require_temporal(address: str) -> None:
    """Check that the Temporal at `address` answers and has the namespace."""
    # Imported here: it takes half a second, which `up` with its own Temporal does not need.
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
    from temporalio.client import Client
    from temporalio.service import RPCError

    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            client = await Client.connect(address, lazy=True)
            await client.workflow_service.describe_namespace(
                DescribeNamespaceRequest(namespace=NAMESPACE), timeout=timedelta(seconds=_ANSWER_SECONDS)
            )
    except (RPCError, RuntimeError, ValueError, TimeoutError) as error:
        # RuntimeError: nothing listens there; ValueError: not an address.
        raise SetupError(
            f"TEMPORAL_ADDRESS: no Temporal with a namespace `{NAMESPACE}` answers at {address}:"
            " start it or correct the address; unset it to start one here"
        ) from error


async def require_engine(url: str, secret: str | None = None) -> str:
    """Check that the engine at `url` answers; returns the name under which it serves its base model."""
    remedy = "start it or correct CLAWLOOP_ENGINES; unset it to start one here"
    limit = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, headers=bearer(secret)) as session,
            session.get(f"{url.rstrip('/')}/v1/models") as answer,
        ):
            answer.raise_for_status()
            models = (await answer.json(content_type=None))["data"]
            bases = [model["id"] for model in models if model.get("parent") is None]
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SetupError(f"engine {url}: {_one_line(error) or 'no answer'}: {remedy}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SetupError(f"engine {url} does not answer like vLLM: {remedy}") from error
    if not bases:
        raise SetupError(f"engine {url} serves no model: {remedy}")
    return str(bases[0])


async def require_engines(urls: tuple[str, ...], secret: str | None = None) -> str:
    """Check that all engines answer and serve the same base model; returns its name.

    Args:
        secret: CLAWLOOP_ENGINE_SECRET.
    """
    names = await asyncio.gather(*(require_engine(url, secret) for url in urls))
    if len(set(names)) > 1:
        listed = ", ".join(f"{url} {name}" for url, name in zip(urls, names, strict=True))
        raise SetupError(f"CLAWLOOP_ENGINES serve different models ({listed}): give engines of one model")
    return names[0]


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _by_process(port: int) -> str:
    """The text " by NAME (process ID)" for the process that listens on a port; "" if it is not visible."""
    for entry in psutil.net_connections("tcp"):
        if entry.laddr and entry.laddr.port == port and entry.status == psutil.CONN_LISTEN and entry.pid:
            try:
                return f" by {psutil.Process(entry.pid).name()} (process {entry.pid})"
            except psutil.Error:
                return ""
    return ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
