"""The same prompts answered by two versions, as side turns, which are not judged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import orjson
from starlette.datastructures import Headers
from starlette.types import Message

from api.chat.request import prepare
from api.chat.stream import ChatExchange
from api.dependencies import Services
from api.errors import to_problem
from clawloop.core.contracts.answers import ComparedPrompt, Comparison, TrainedReply, VersionAnswer
from clawloop.core.contracts.serving import ApiKey, Scope
from clawloop.core.contracts.training import VersionView
from clawloop.core.errors import ClawloopError, NotFound, StateConflict, ValueRejected
from clawloop.core.ids import version_name
from clawloop.core.turns.canonical import is_volatile
from clawloop.core.turns.titles import plain_text

PROMPT_CHARACTERS = 8000
# Each prompt is two replies, one after the other for each prompt: a minute for all of them on a slow engine.
MOST_PROMPTS = 8
_CHAT_PATH = "/v1/chat/completions"
# Two or three screens: enough to see how a version writes, and soon there.
_ANSWER_TOKENS = 512
# An agent looks every two seconds, and an engine loads an adapter within some seconds.
LOAD_SECONDS = 60.0
_LOOK_AGAIN_SECONDS = 0.5
# Long enough to ask once more; engines have few slots for adapters.
_WANTED = timedelta(minutes=2)
# Number of prompts taken from the requests that a version learned from, if no prompt is given.
_OWN_PROMPTS = 3


async def compare(
    services: Services, key: ApiKey, policy: str, number: int, prompts: Sequence[str] | None, other: int | None = None
) -> Comparison:
    """
    Args:
        key: whose the turns are.
        other: the version to compare with; None: its parent.
        prompts: None: what people asked in the first replies that the version was trained on.

    Raises:
        NotFound: there is no such version, or none to compare with.
        StateConflict: the key belongs to another policy.
        ValueRejected: a prompt is empty or too long, there are too many or none, or both versions are the same.
        StoreUnavailable
    """
    versions = {version.n: version for version in await services.training.versions(policy)}
    if key.policy != policy:
        raise StateConflict(
            f"This key belongs to the policy {key.policy!r}, and so would the turns: use an admin key of {policy!r}"
            f" (`clawloop key create --scope admin --policy {policy}`).",
            code="other_policy",
            field="policy",
        )
    if (version := versions.get(number)) is None or (other is None and version.parent is None):
        message = f"Policy {policy!r} has no version {number} with a parent."
        raise NotFound(message, code="version_not_found", field="version")
    if (beside := versions.get(other if other is not None else version.parent or 0)) is None:
        raise NotFound(f"Policy {policy!r} has no version {other}.", code="version_not_found", field="other")
    if beside.n == number:
        raise ValueRejected("Name another version to compare with.", field="other")
    if prompts is None:
        batch = await services.training_browser.batch(policy, number)
        asked = [words for reply in batch if (words := _request_of(reply)) is not None]
        prompts = list(dict.fromkeys(asked))[:_OWN_PROMPTS]
    if not 0 < len(prompts) <= MOST_PROMPTS:
        message = f"Give 1 to {MOST_PROMPTS} prompts" + ("." if prompts else ": this version's own are not there.")
        raise ValueRejected(message, field="prompts")
    if any(not 0 < len(prompt.strip()) <= PROMPT_CHARACTERS for prompt in prompts):
        raise ValueRejected(f"A prompt has 1 to {PROMPT_CHARACTERS:,} characters.", field="prompts")
    chatting = replace(key, scopes=key.scopes | {Scope.CHAT})
    missing = await _load(services, policy, [beside, version])
    compared = []
    for prompt in prompts:
        both = (_ask(services, chatting, n, prompt.strip(), missing.get(n)) for n in (beside.n, number))
        compared.append(ComparedPrompt(prompt=prompt.strip(), answers=await asyncio.gather(*both)))
    return Comparison(version=number, parent=version.parent, prompts=compared)


def _request_of(reply: TrainedReply) -> str | None:
    """The user's last question before this reply; None if no user message has text."""
    for message in reversed(reply.added):
        if message.get("role") == "user" and not is_volatile(message) and (words := plain_text(message).strip()):
            return words[:PROMPT_CHARACTERS]
    return None


async def _load(services: Services, policy: str, versions: Sequence[VersionView]) -> dict[int, str]:
    """Have engines load these versions, and wait for it; why one is not there, by its number."""
    problems = {version.n: "Its files were removed." for version in versions if "files removed" in version.state}
    wanted = [version.n for version in versions if version.n not in problems and version.n > 0]
    await services.want_versions(policy, wanted, _WANTED)
    until = time.monotonic() + LOAD_SECONDS
    while lacking := [n for n in wanted if not services.engines.has_version(policy, n)]:
        if time.monotonic() > until:
            return problems | dict.fromkeys(lacking, f"No engine has loaded it within {LOAD_SECONDS:g} s.")
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        await services.directory.refresh()
    return problems


async def _ask(services: Services, key: ApiKey, version: int, prompt: str, missing: str | None) -> VersionAnswer:
    if missing is not None:
        return VersionAnswer(version=version, text=None, problem=missing)
    policy = await services.directory.find_policy(key.policy)
    body = {
        "model": version_name(policy.id, version, policy.base_model),
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": _ANSWER_TOKENS,
        # The likeliest answer: what differs is the versions, not the luck of sampling.
        "temperature": 0,
    }
    try:
        exchange = ChatExchange(await prepare(services, key, Headers({"x-turn-type": "side"}), body), services)
    except ClawloopError as error:
        return VersionAnswer(version=version, text=None, problem=to_problem(error).message)
    sent = bytearray()

    async def send(message: Message) -> None:
        sent.extend(message.get("body", b""))

    async def receive() -> Message:
        return await asyncio.Future[Message]()  # the client stays

    await exchange({"type": "http", "path": _CHAT_PATH, "headers": []}, receive, send)
    answer = orjson.loads(sent)
    if (problem := answer.get("error")) is not None:
        return VersionAnswer(version=version, text=None, problem=str(problem["message"]))
    return VersionAnswer(version=version, text=str(answer["choices"][0]["message"].get("content") or ""))
