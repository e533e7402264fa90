"""What is looked at before `clawloop up` starts anything, so that a wrong setting is one clear line.

Knows nothing about how parts are run. Every check raises SetupError with what to do about it.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import aiohttp
import psutil
import psycopg

from clawloop.errors import SetupError
from clawloop.local.services.temporal_server import NAMESPACE
from clawloop.local.services.vllm import chat_template
from db.database import driver_url, postgres_message

# A fresh PostgreSQL takes 60 MiB, four logs at most 80, an adapter of a 4B model 130: room for the first days.
NEEDED_BYTES = 2**30
# Decoders whose projections carry the names our adapters train.
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
_SIZES = ("num_attention_heads", "num_hidden_layers", "hidden_size", "max_position_embeddings")
# Somebody waits at the terminal; what answers later than this is as good as away.
_ANSWER_SECONDS = 10.0


@contextmanager
def held_data_folder(data: Path) -> Iterator[None]:
    """Hold a data folder for this process alone, until the end of the block or of the process."""
    with held(data / "up.lock", f"clawloop up already runs on {data}"):
        yield


@contextmanager
def held(path: Path, already: str) -> Iterator[None]:
    """Hold a lock file, which is made if it is not there and says who holds it.

    Args:
        already: what is the case when another process holds it.
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
            raise SetupError(
                f"{already} (process {file.read().strip() or 'unknown'}):"
                " stop it first, or choose another folder: --data"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def require_folder(folder: Path) -> None:
    """See that a data folder is there, or make it, and that it can be written to."""
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
    """A port that can be listened on: the one asked for, or a free one for 0.

    Args:
        option: the command-line option that chooses it.
    """
    if port == 0:
        return _free_port(host)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError) as error:
        raise SetupError(f"{host}:{port} is no address to listen on for {part}: {error}") from error
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except PermissionError:
            raise SetupError(f"port {port} for {part} needs more rights: choose one above 1023 with {option}") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SetupError(
                    f"port {port} for {part} is in use{_by_whom(port)}: stop that, or choose another port with"
                    f" {option} (0 takes a free one)"
                ) from None
            raise SetupError(f"cannot listen on {host}:{port} for {part}: {error.strerror}") from error
    return port


def require_model(folder: Path) -> None:
    """See that a folder holds a model that can be served and trained."""
    remedy = "give the folder of a model in Hugging Face's layout: --model PATH"
    if not folder.is_dir():
        raise SetupError(f"there is no model folder {folder}: {remedy}")
    config = folder / "config.json"
    if not config.is_file():
        raise SetupError(f"{folder} holds no model, config.json is missing: {remedy}")
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
        architecture = content["architectures"][0]
        sizes = [content[name] for name in _SIZES]
        readable = all(isinstance(size, int) and size > 0 for size in sizes)
    except (ValueError, LookupError, TypeError):
        readable, architecture = False, ""
    if not readable:
        raise SetupError(f"{config} does not describe a language model: {remedy}")
    if architecture not in ARCHITECTURES:
        raise SetupError(
            f"{folder} is a {architecture}, which cannot be trained here: choose a model that is one of"
            f" {', '.join(ARCHITECTURES)}"
        )
    if not any(folder.glob("*.safetensors")):
        raise SetupError(f"{folder} has no weights (*.safetensors): download the model again, completely")
    if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file():
        raise SetupError(f"{folder} has no tokenizer (tokenizer.json): download the model again, completely")
    if not chat_template(folder):
        raise SetupError(
            f"{folder} has no chat template, so it cannot chat: choose the instruction-tuned model of its family"
        )


async def require_database(url: str) -> None:
    """See that a given PostgreSQL lets us in. The password is in no message."""
    plain = driver_url(url).replace("+psycopg://", "://", 1)
    try:
        connection = await psycopg.AsyncConnection.connect(plain, connect_timeout=int(_ANSWER_SECONDS))
        await connection.close()
    except psycopg.Error as error:
        raise SetupError(
            f"DATABASE_URL: {postgres_message(error)}: start that PostgreSQL or mend the URL; unset it to use our own"
        ) from None


async def require_temporal(address: str) -> None:
    """See that a given Temporal answers and has our namespace."""
    # Half a second of import that only those pay who give an address.
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
        # RuntimeError: nothing listens there; ValueError: it is no address at all.
        raise SetupError(
            f"TEMPORAL_ADDRESS: no Temporal with a namespace `{NAMESPACE}` answers at {address}:"
            " start it or mend the address; unset it to use our own"
        ) from error


async def require_engine(url: str) -> str:
    """See that a given engine answers; returns the name under which it serves its base model."""
    remedy = "start it or mend CLAWLOOP_ENGINES; unset it to use our own"
    limit = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
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


async def require_engines(urls: tuple[str, ...]) -> str:
    """See that all given engines answer and serve the same base model; returns its name."""
    names = await asyncio.gather(*(require_engine(url) for url in urls))
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


def _by_whom(port: int) -> str:
    for entry in psutil.net_connections("tcp"):
        if entry.laddr and entry.laddr.port == port and entry.status == psutil.CONN_LISTEN and entry.pid:
            try:
                return f" by {psutil.Process(entry.pid).name()} (process {entry.pid})"
            except psutil.Error:
                return ""
    return ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
