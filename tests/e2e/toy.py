"""The demo's model on a real engine: it answers a synthetic user, and judges its replies by what the user says next."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg
from temporalio.service import RPCError, RPCStatusCode

from clawloop.app.demo.run import BASE_MODEL
from clawloop.app.demo.sessions import CHAT_TEMPERATURE
from clawloop.app.demo.toys import CHAT_MODEL
from clawloop.app.demo.user import SyntheticUser
from clawloop.app.temporal.plugin import connect
from clawloop.serving.adapters import VllmControl
from db.schema import migrate
from tests.conftest import database_address, execute
from tests.e2e.gateway import RealGateway, prepared, running_gateway
from tests.e2e.workers import running_workers
from workflows.names import training_workflow_id

CONTEXT_TOKENS = 2048
_MAX_TOKENS = 128
# As many sessions as chat at once; the engine has places for more.
_AT_ONCE = 16


def toy_model(folder: Path) -> Path:
    """A copy of the demo's model in a folder of the name that it is served by."""
    model = folder / BASE_MODEL
    shutil.copytree(CHAT_MODEL, model)
    return model


@dataclass
class Conversation:
    """
    Attributes:
        replies: ids of the replies, in order; nobody reacts to the last one.
        said: what the user typed.
    """

    replies: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


async def converse(client: httpx.AsyncClient, user: SyntheticUser, session: str, requests: int = 5) -> Conversation:
    """A session in which a user asks, and reacts to each reply but the last with the next request."""
    found, request = Conversation(), user.first_request()
    messages: list[dict[str, Any]] = [{"role": "user", "content": request.text}]
    for number in range(1, requests + 1):
        body = {"model": "policy", "messages": messages, "max_tokens": _MAX_TOKENS, "temperature": CHAT_TEMPERATURE}
        ends = {"session_id": session, "session_done": number == requests}
        answer = await client.post("/v1/chat/completions", json=body | ends)
        assert answer.status_code == 200, answer.text
        reply = answer.json()["choices"][0]["message"]
        found.replies.append(answer.json()["id"])
        following = user.follow_up(request, reply["content"] or "")
        found.said.append(messages[-1]["content"])
        messages += [reply, {"role": "user", "content": following.text}]
        request = following.request
    return found


async def converse_all(gateway: RealGateway, users: Mapping[str, SyntheticUser]) -> list[Conversation]:
    """The sessions of these names, a few at once."""
    places = asyncio.Semaphore(_AT_ONCE)
    async with gateway.client() as client:

        async def one(session: str, user: SyntheticUser) -> Conversation:
            async with places:
                return await converse(client, user, session)

        return await asyncio.gather(*(one(session, user) for session, user in users.items()))


@asynccontextmanager
async def toy_gateway(
    postgres: str, name: str, data: Path, engine: str, temporal: str, **settings: str
) -> AsyncIterator[RealGateway]:
    """A gateway on a new database of this name; at the end the engine has no adapter any more.

    Args:
        postgres: a server's URL.
        settings: environment variables.
    """
    execute(postgres, f"CREATE DATABASE {name}")
    url = database_address(postgres, name)
    await asyncio.to_thread(migrate, url)
    keys = await prepared(url, [engine], BASE_MODEL)
    try:
        async with running_gateway(url, keys, data, 0, TEMPORAL_ADDRESS=temporal, **settings) as gateway:
            yield gateway
    finally:
        async with VllmControl(engine, data) as control:
            for adapter in await control.names():
                await control.unload(adapter)  # other tests use the engine later
        await _end_training(url, temporal)


async def _end_training(database_url: str, temporal: str) -> None:
    """End the workflows of all policies: those of another database know other steps, and its policies have these
    names."""
    client = await connect(temporal)
    with psycopg.connect(database_url) as connection:
        policies = [policy for (policy,) in connection.execute("SELECT id FROM policies")]
    for policy in policies:
        try:
            await client.get_workflow_handle(training_workflow_id(policy)).terminate("its test has ended")
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise


@asynccontextmanager
async def toy_workers(
    gateway: RealGateway, temporal: str, engine: str, model: Path, **settings: str
) -> AsyncIterator[None]:
    """All workers of one machine. The judge is the base model on the engine that chats use."""
    commands: Sequence[Sequence[str]] = (
        ["orchestrator"],
        ["judge"],
        ["trainer", "--base-model", model.name],
        ["engine", "--engine", engine],
    )
    settings |= {"CLAWLOOP_MODEL": str(model)}
    async with running_workers(gateway.data, gateway.database_url, temporal, *commands, **settings):
        yield


async def admin(gateway: RealGateway, path: str, body: Any = None) -> Any:
    """What the admin API answers; with a body to a POST."""
    headers = {"Authorization": f"Bearer {gateway.admin_key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=120) as client:
        if body is None:
            answer = await client.get(f"/admin/v1/{path}")
        else:
            answer = await client.post(f"/admin/v1/{path}", json=body)
    assert answer.status_code < 300, answer.text
    return answer.json()


def outcomes(database_url: str) -> str:
    """What became of each main turn, for a failed test."""
    query = "SELECT version, outcome, outcome_detail FROM turns WHERE kind = 'main' ORDER BY id"
    with psycopg.connect(database_url) as connection:
        found = connection.execute(query).fetchall()
    return "\n".join(f"v{version} {outcome}: {detail}" for version, outcome, detail in found)
