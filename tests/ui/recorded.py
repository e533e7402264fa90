"""Sessions, judgements, steps and episodes in PostgreSQL, as the gateway and the workers store them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from pydantic import JsonValue

from clawloop.core.contracts.episodes import Ending, EpisodeBegun, EpisodeEnd, EpisodeScore
from clawloop.core.contracts.lessons import ShownLesson
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnOutcome
from clawloop.core.episodes.running import Artifacts
from clawloop.core.ids import ApiKeyId, TurnId
from clawloop.core.judging.hints import HintChoice, PromptChange
from clawloop.core.judging.records import HINTS, FinalizedJudgement
from clawloop.core.judging.voting import HintVote, Verdict, Vote, in_words
from clawloop.environments.choice import found_by_agent
from clawloop.environments.playing import packed
from db.episodes.groups import PostgresEpisodeStore
from tests.contract.episodes import new_group
from tests.contract.learning import PostgresLearning
from tests.pictures import image_part, png
from tests.records import turn_record

HINT = "Answer in one sentence; the user asked for short answers."
CHANGED = "Make it shorter, please."


@dataclass
class Recorder:
    """Stores turns of one policy."""

    learning: PostgresLearning

    async def chat(
        self,
        session: str,
        *said: str,
        reply: str = "A long answer.",
        version: int = 0,
        lessons: tuple[ShownLesson, ...] = (),
    ) -> list[TurnId]:
        """A session in which a person says these things in turn."""
        evidence = SessionEvidence(SessionSource.HEADER, session)
        messages: list[Message] = [{"role": "system", "content": "You are an assistant."}]
        turns: list[TurnId] = []
        for words in said:
            messages.append({"role": "user", "content": words})
            answer: Message = {"role": "assistant", "content": f"{reply} ({len(turns) + 1})"}
            turns.append(await self.turn(messages, answer, evidence=evidence, version=version, lessons=lessons))
            messages.append(answer)
        return turns

    async def turn(self, messages: Sequence[Message], response: Message | None, **changes: Any) -> TurnId:
        key = self.learning.key
        turn = turn_record(messages=list(messages), response=response, api_key_id=key, **changes)
        await self.learning.turns.insert(turn)
        return turn.turn_id

    async def judge(
        self,
        turn: TurnId,
        verdict: Vote,
        hint: str | None = None,
        raw: str = "It was too long.",
        after: TurnId | None = None,
    ) -> None:
        """Three votes of a judge, a hint if there is one, and a sample.

        Args:
            after: the turn whose request holds the reaction.
        """
        judgements = self.learning.judgements
        opened = await judgements.open(turn, after, b"evidence", HINTS)
        votes: list[tuple[int, str, Vote | None]] = [(n, f"{raw}\nverdict: {verdict}", verdict) for n in range(3)]
        await judgements.store_votes(opened.id, votes)
        if hint is not None:
            await judgements.store_hints(opened.id, HINTS, [(0, f"hint: {hint}", HintVote(True, hint))])
        finalized = FinalizedJudgement(
            verdict=Verdict(verdict, float(verdict), float(verdict), f"3 of 3 votes {in_words(verdict)}"),
            hint=HintChoice(() if hint is None else (hint,), answered=True, why="none" if hint is None else "1 of 1"),
            not_trainable=None,
            reward=float(verdict) or None,
            hinted_prompts=() if hint is None else (PromptChange(0, 0, (1, 2, 3, 4)),),
            outcome=TurnOutcome.SAMPLED,
            why=f"verdict {in_words(verdict)}",
        )
        await judgements.finalize(opened.id, finalized, [])


async def played_repair(learning: PostgresLearning, artifacts: Artifacts) -> EpisodeBegun:
    """A settled group's first episode, of `swe`: it read a file, saw a picture, repaired the file and said so."""
    store = PostgresEpisodeStore(learning.database)
    group = replace(new_group(2), environment="swe", task="train-3")
    await store.make_group(group)
    repaired, idle = [await store.begin_episode(group.id, place, 1, timedelta(hours=1)) for place in range(2)]
    found = found_by_agent("swe", "train-3")
    assert found is not None
    with tarfile.open(fileobj=io.BytesIO(found)) as archive:
        files = {info.name: read.read() for info in archive if (read := archive.extractfile(info)) is not None}
    path = min(path for path in files if path.endswith(".py"))
    left = files | {path: files[path] + b"# repaired\n", "notes.txt": b"done\n"}
    messages: list[Message] = [{"role": "user", "content": f"Something in {path} is wrong."}]
    await _replies(learning, repaired, messages, _call("shell", {"command": f"cat {path}"}))
    messages += [_result(files[path].decode()), {"role": "user", "content": [image_part(png())]}]
    await _replies(learning, repaired, messages, _call("shell", {"command": "diff -u old new"}))
    messages.append(_result("--- old\n+++ new\n@@ -1 +1 @@\n-return a - b\n+return a + b"))
    await _replies(learning, repaired, messages, {"role": "assistant", "content": "It is repaired."})
    await _replies(learning, idle, messages[:1], {"role": "assistant", "content": "I cannot."})
    digest = await artifacts.store(packed(left))
    for episode, reward in ((repaired, 1.0), (idle, 0.0)):
        await store.end_episode(EpisodeEnd(episode.id, Ending.COMPLETED, artifact_sha256=digest))
        await store.score_episode(EpisodeScore(episode.id, reward, ""))
    await store.settle(group.id)
    return repaired


async def _replies(learning: PostgresLearning, episode: EpisodeBegun, messages: list[Message], reply: Message) -> None:
    key = ApiKeyId(episode.id)
    record = turn_record(messages=list(messages), response=reply, api_key_id=key, episode_id=episode.id)
    await learning.turns.insert(record)
    messages.append(reply)


def _call(name: str, arguments: dict[str, str]) -> Message:
    function: JsonValue = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def _result(content: str) -> Message:
    return {"role": "tool", "tool_call_id": "c", "content": content}
