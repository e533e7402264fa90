"""Storage per token does not grow with the length of a conversation like OpenClaw's."""

from __future__ import annotations

import random
import sys
import time
from array import array
from statistics import median

import psycopg
import pytest

from clawloop.core.contracts.turns import Message, TurnRecord
from db.database import Database
from db.turns.insert import PostgresTurnStore
from db.turns.read import ConversationCache
from tests.contract.conftest import Stores
from tests.records import turn_record

pytestmark = pytest.mark.slow

TURNS = 100
CHARACTERS_PER_TOKEN = 4
REPLY_TOKENS = 150
VOCABULARY = 151_000

_random = random.Random(7)
_WORDS = ["".join(_random.choices("abcdefghijklmnopqrstuvwxyz", k=_random.randint(2, 9))) for _ in range(4000)]


def prose(characters: int) -> str:
    """Text that compresses about as real text does."""
    words: list[str] = []
    while sum(map(len, words)) + len(words) < characters:
        words.append(_WORDS[min(int(_random.paretovariate(0.7)), len(_WORDS) - 1)])
    return " ".join(words)[:characters]


def tokens(count: int) -> list[int]:
    return [min(int(_random.paretovariate(0.4)) * 7, VOCABULARY) for _ in range(count)]


def openclaw_chat(stores: Stores, turns: int, characters_each: int = 1320) -> list[TurnRecord]:
    """A 24k-character system prompt, 12 tools, and in each request a message that is gone in the next."""
    _random.seed(7)  # the same chat whatever ran before
    system: Message = {"role": "system", "content": prose(24_000)}
    tools = [{"type": "function", "function": {"name": f"tool{n}", "description": prose(600)}} for n in range(12)]
    system_ids = tokens((24_000 + 12 * 600) // CHARACTERS_PER_TOKEN)
    history: list[Message] = []
    history_ids: list[int] = []
    records = []
    for _ in range(turns):
        history.append({"role": "user", "content": prose(characters_each)})
        history_ids += tokens(characters_each // CHARACTERS_PER_TOKEN)
        volatile = f"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n{prose(600)}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
        reply = tokens(REPLY_TOKENS)
        answer = prose(REPLY_TOKENS * CHARACTERS_PER_TOKEN)
        records.append(
            turn_record(
                api_key_id=stores.key,
                messages=[system, *history, {"role": "user", "content": [{"type": "text", "text": volatile}]}],
                tools=tools,
                response={"role": "assistant", "content": answer, "reasoning_content": "Hm.", "tool_calls": []},
                prompt_ids=[*system_ids, *history_ids, *tokens(150)],
                response_ids=reply,
                logprobs=array("f", [-_random.expovariate(2.0) for _ in reply]).tolist(),
            )
        )
        history.append({"role": "assistant", "content": answer})  # the client leaves out what it does not know
        history_ids += [*reply, 151_645]
    return records


def stored_bytes(url: str) -> int:
    """What all rows of the conversation take on disk, compressed as they are, with their indexes."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM FULL")  # else half-filled pages count
        row = connection.execute(
            "SELECT sum(pg_total_relation_size(name)) FROM unnest("
            "ARRAY['turns', 'session_prefixes', 'tool_lists', 'sessions']::regclass[]) AS name"
        ).fetchone()
    assert row is not None
    return int(row[0])


async def test_storage_per_token_stays_constant_as_a_conversation_grows(
    postgres_stores: Stores, postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    records = openclaw_chat(postgres_stores, TURNS)
    stored = {0: stored_bytes(postgres_url)}
    length: dict[int, int] = {}
    whole_requests = 0
    for number, record in enumerate(records, start=1):
        await postgres_stores.turns.insert(record)
        length[number] = len(record.prompt_ids or ()) + REPLY_TOKENS
        whole_requests += length[number]
        if number % 20 == 0:
            stored[number] = stored_bytes(postgres_url)

    empty = stored.pop(0)
    for_each_token = {number: (stored[number] - empty) / length[number] for number in stored}
    added = {
        number: (stored[number] - stored[number - 20]) / (length[number] - length[number - 20])
        for number in stored
        if number > 20
    }
    show(
        capsys,
        f"a conversation of {length[TURNS]} tokens, {whole_requests} in all its requests: {stored[TURNS]} bytes",
        f"bytes for each token, at turn: { {n: round(b, 1) for n, b in for_each_token.items()} }",
        f"bytes for each token added, up to turn: { {n: round(b, 1) for n, b in added.items()} }",
    )

    # Pages of 8 KiB make steps of a tenth in each table and index; whole requests would make the last figure five times
    # the first.
    assert max(added.values()) < 2 * min(added.values())
    assert for_each_token[TURNS] < 1.3 * for_each_token[20]
    assert stored[TURNS] < whole_requests  # one byte for each token of all requests: far from storing them whole


def show(capsys: pytest.CaptureFixture[str], *lines: str) -> None:
    with capsys.disabled():
        sys.stdout.write("".join(f"\n    {line}" for line in lines) + "\n")


async def test_tools_are_stored_once(postgres_stores: Stores, postgres_url: str) -> None:
    for record in openclaw_chat(postgres_stores, 3):
        await postgres_stores.turns.insert(record)
    await postgres_stores.turns.insert(turn_record(api_key_id=postgres_stores.key, tools=record.tools))

    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM tool_lists").fetchone() == (1,)


async def test_a_long_conversation_is_rebuilt_exactly_without_the_cache(
    postgres_stores: Stores, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    records = openclaw_chat(postgres_stores, TURNS)
    seconds = []
    for record in records:
        began = time.perf_counter()
        await postgres_stores.turns.insert(record)
        seconds.append(time.perf_counter() - began)

    forgetful = PostgresTurnStore(database, ConversationCache(cache_bytes=0))
    began = time.perf_counter()
    stored = await forgetful.load(records[-1].turn_id)
    loading = time.perf_counter() - began

    assert stored is not None
    assert stored.record == records[-1]
    for place in range(0, TURNS, 9):
        earlier = await forgetful.load(records[place].turn_id)
        assert earlier is not None
        assert earlier.record == records[place]
    tokens_at_50 = len(records[49].prompt_ids or ())
    show(
        capsys,
        f"enter at turns 45-55 ({tokens_at_50} prompt tokens): median {median(seconds[44:55]) * 1000:.1f} ms",
        f"enter at turn 1: {seconds[0] * 1000:.1f} ms, at turn 100: {seconds[-1] * 1000:.1f} ms",
        f"turn 100 rebuilt from its ancestors: {loading * 1000:.1f} ms",
    )
    assert median(seconds[44:55]) < 0.25  # half of what a chat waits; about 10 ms on an idle machine
