"""An encrypted database with one of everything that holds content, and what must not be found in it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import psycopg
from psycopg.sql import SQL, Identifier

from clawloop.app.processes.operations import FILES, DatabaseCheck
from clawloop.core.contracts.sessions import FeedbackEffect
from clawloop.core.contracts.training import ProbeContent
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnStatus
from clawloop.core.encryption.key_file import make_keys
from clawloop.core.encryption.sealer import Sealer
from clawloop.core.ids import TurnId
from clawloop.core.turns.canonical import response_digest
from db.content import PLAIN, ContentCodec, advantages_to_bytes, ids_to_bytes, logprobs_to_bytes
from db.database import Database
from db.judging.feedback import PostgresFeedbackStore
from db.tables import Base
from db.training.probes import PostgresProbeStore
from db.turns.files import PostgresFileStore
from db.turns.insert import PostgresTurnStore
from db.turns.sessions import PostgresSessionStore
from tests.contract.conftest import TEST_LIMIT
from tests.contract.learning import POLICY, PostgresLearning, commit, trained
from tests.pictures import asks_about, png
from tests.records import turn_record
from tests.ui.recorded import Recorder

WORDS = ("zebrasay", "otterreply", "heronprompt", "lynxtool", "ibexstop", "koalahint", "mothvote", "newtcomment")
SAY, REPLY, SYSTEM, TOOL, STOP, HINT, VOTE, COMMENT = WORDS
PROBE, FAULT = "quollprobe", "stoatfault"
PICTURE = png(pixels=b"the wombat's own picture")
PROMPT_IDS, RESPONSE_IDS = [70_001, 70_002, 70_003], [71_001, 71_002]
LOGPROBS, ADVANTAGES, MOVES = [-0.8125, -0.4375], [0.6875, -0.3125], [0.1875, -0.0625]
HINTED_IDS = [1, 2, 3, 4]  # as `Recorder.judge` makes them
ANSWER: Message = {"role": "assistant", "content": f"It is {REPLY}."}
TOOLS = [{"type": "function", "function": {"name": TOOL, "parameters": {"type": "object"}}}]
NAMED = SessionEvidence(SessionSource.HEADER, "encrypted-session")
PICTURED = SessionEvidence(SessionSource.HEADER, "session with a picture")


def codec(folder: Path, name: str = "keys") -> ContentCodec:
    """With the keys of this file, which is made if it is not there."""
    path = folder / name
    if not path.exists():
        make_keys(path)
    return ContentCodec(Sealer(path))


@dataclass
class Loop:
    """
    Attributes:
        turn: with a hint, a comment, and advantages of the step that learned from it.
    """

    learning: PostgresLearning
    turn: TurnId
    next_turn: TurnId

    @property
    def database(self) -> Database:
        return self.learning.database


async def whole_loop(url: str, content: ContentCodec) -> Loop:
    """Chat, judge, hint, comment, train: each by the store that does it."""
    learning = await PostgresLearning.on(url, Database(url, TEST_LIMIT, content))
    asked: list[Message] = [
        {"role": "system", "content": f"Be like {SYSTEM}."},
        {"role": "user", "content": f"Say {SAY}"},
    ]
    fields: dict[str, Any] = {
        "api_key_id": learning.key,
        "evidence": NAMED,
        "tools": TOOLS,
        "sampling": {"temperature": 0.5, "stop": [STOP]},
    }
    first = turn_record(
        messages=asked,
        response=ANSWER,
        prompt_ids=PROMPT_IDS,
        response_ids=RESPONSE_IDS,
        logprobs=LOGPROBS,
        **fields,
    )
    more: list[Message] = [*asked, ANSWER, {"role": "user", "content": f"Shorter {SAY}"}]
    second = turn_record(
        messages=more, response=ANSWER, prompt_ids=[*PROMPT_IDS, *RESPONSE_IDS, 70_004], response_ids=[71_003],
        logprobs=[-0.25], **fields,
    )  # fmt: skip
    failed = turn_record(
        messages=more, response=None, response_ids=None, logprobs=None, status=TurnStatus.ERROR, error=FAULT, **fields
    )
    shown = turn_record(messages=[asks_about(PICTURE)], **fields | {"evidence": PICTURED})
    for record in (first, second, failed, shown):
        await learning.turns.insert(record)
    await Recorder(learning).judge(first.turn_id, 1, hint=f"Mention {HINT}", raw=f"It was {VOTE}")
    await learning.add_samples(3)
    given = await PostgresFeedbackStore(learning.database).give(learning.key, second.turn_id, None, COMMENT)
    assert given is not None and given.effect is FeedbackEffect.AMENDS  # noqa: PT018
    probe = ProbeContent(messages=[{"role": "user", "content": PROBE}], contains=[PROBE])
    await PostgresProbeStore(learning.database).add(POLICY, [probe], 10)
    await learning.steps.claim(POLICY, 1)
    batch = await learning.steps.batch(POLICY, 1)
    [sample] = [one for one in batch.samples if one.hinted_prompts]
    assert (sample.prompt_ids, sample.response_ids, sample.logprobs) == (PROMPT_IDS, RESPONSE_IDS, LOGPROBS)
    assert sample.hinted_prompts == {0: HINTED_IDS}
    assert sample.temperature == 0.5
    result = trained(batch, advantages={sample.sample_id: list(ADVANTAGES)})
    moves = {sample.sample_id: list(MOVES)}
    result = replace(result, figures=replace(result.figures, moves=moves))
    assert await commit(learning, batch, result) == "committed"
    return Loop(learning, first.turn_id, second.turn_id)


def dump(url: str) -> str:
    """Every row of every table as text."""
    rows: list[str] = []
    with psycopg.connect(url) as connection:
        for table in Base.metadata.tables:
            rows += [row for (row,) in connection.execute(SQL("SELECT t::text FROM {} t").format(Identifier(table)))]
    return "\n".join(rows)


def content_found_in(stored: str) -> list[str]:
    """Words and arrays of the loop that stand in a dump, or a file, as they are."""
    arrays = {
        "prompt ids": ids_to_bytes(PROMPT_IDS),
        "response ids": ids_to_bytes(RESPONSE_IDS),
        "hinted ids": ids_to_bytes(HINTED_IDS),
        "log-probs": logprobs_to_bytes(LOGPROBS),
        "advantages": advantages_to_bytes(ADVANTAGES),
        "moves": advantages_to_bytes(MOVES),
        "digest of a reply": response_digest(ANSWER),
        "picture": PICTURE,
        "digest of a picture": sha256(PICTURE).digest(),
    }
    marks = {word: word for word in (*WORDS, PROBE, FAULT)}
    marks |= {f"{word} in hexadecimal": word.encode().hex() for word in (*WORDS, PROBE, FAULT)}
    marks |= {name: array.hex() for name, array in arrays.items()}
    # Not a single id: a few digits stand in some hexadecimal text by chance.
    marks |= {"prompt ids as JSON": json.dumps(PROMPT_IDS)[1:-1]}
    return [name for name, mark in marks.items() if mark in stored]


@asynccontextmanager
async def opened(url: str, content: ContentCodec = PLAIN) -> AsyncIterator[Database]:
    database = Database(url, TEST_LIMIT, content)
    try:
        yield database
    finally:
        await database.close()


async def require_readable(database: Database, loop: Loop) -> None:
    """All of the loop reads as it was written, by a process that has nothing in memory."""
    stored = await PostgresTurnStore(database).load(loop.turn)
    assert stored is not None
    assert stored.record.response == ANSWER
    assert (stored.record.prompt_ids, stored.record.response_ids) == (PROMPT_IDS, RESPONSE_IDS)
    assert stored.record.tools == TOOLS
    assert stored.record.sampling["stop"] == [STOP]
    detail = await PostgresSessionStore(database).detail(loop.turn, tokens=True)
    assert detail is not None
    assert HINT in str(detail.turn.hints)
    assert [VOTE in vote.answer for vote in detail.judged.votes] == [True] * 3
    assert HINT in str(detail.judged.hints[0].text)
    assert detail.tokens is not None
    assert (detail.tokens.advantages, detail.tokens.moves) == (ADVANTAGES, MOVES)
    assert await PostgresFileStore(database).read(sha256(PICTURE).hexdigest()) == PICTURE
    second = await PostgresSessionStore(database).detail(loop.next_turn, tokens=False)
    assert second is not None
    assert [given.text for given in second.judged.feedback] == [COMMENT]


async def require_clean(database: Database) -> None:
    """All content is encrypted and can be decrypted, as `clawloop check` says."""
    report = await DatabaseCheck(database, Path("none")).report(files=True)
    # The loop's step made no files.
    assert [broken for broken in report.violations if broken.invariant != FILES] == []
