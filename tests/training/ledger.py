"""Samples of the tiny model in PostgreSQL, inserted as the gateway and the judge insert them."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.training import BatchSample
from clawloop.core.contracts.turns import SessionEvidence, SessionSource, TurnOutcome
from clawloop.core.judging.hints import NOT_ASKED, PromptChange
from clawloop.core.judging.records import FinalizedJudgement
from clawloop.core.judging.voting import Verdict
from clawloop.core.recipes.recipe import Recipe
from db.database import Database
from db.judging.judgements import PostgresJudgementStore
from db.serving.directory import ensure_policy
from db.serving.keys import PostgresKeyStore
from db.training.recipes import ensure_recipe
from db.turns.insert import PostgresTurnStore
from tests.records import turn_record


async def insert_samples(
    database: Database, url: str, samples: Sequence[BatchSample], recipe: Recipe, policy: str = "default"
) -> None:
    """The policy `tiny` with this recipe, and one judged turn for each sample."""
    await ensure_policy(database, policy, "tiny", [])
    await ensure_recipe(database, policy, recipe)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE policies SET recipe_hash = %s WHERE id = %s", [recipe.hash, policy])
    key, _ = await PostgresKeyStore(database).create_key(policy, frozenset({Scope.CHAT}), "test")
    turns, judgements = PostgresTurnStore(database), PostgresJudgementStore(database)
    for place, sample in enumerate(samples):
        record = turn_record(
            f"question {place}",
            policy=policy,
            api_key_id=key.id,
            evidence=SessionEvidence(SessionSource.HEADER, f"session {place}"),
            version=sample.version,
            prompt_ids=list(sample.prompt_ids),
            response_ids=list(sample.response_ids),
            logprobs=list(sample.logprobs),
            sampling={"temperature": sample.temperature, "top_p": 1.0, "top_k": -1},
        )
        await turns.insert(record)
        opened = await judgements.open(record.turn_id, None, b"evidence", "hints")
        good = sample.reward is not None and sample.reward > 0
        finalized = FinalizedJudgement(
            verdict=Verdict(1 if good else -1, sample.reward, sample.reward, "3 of 3 votes"),
            hint=NOT_ASKED,
            not_trainable=None,
            reward=sample.reward,
            hinted_prompts=tuple(
                PromptChange.between(sample.prompt_ids, one) for one in sample.hinted_prompts.values()
            ),
            outcome=TurnOutcome.SAMPLED,
            why="a test's",
        )
        await judgements.finalize(opened.id, finalized, [])
