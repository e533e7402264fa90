"""A judge that was tried: its form, its biases, and no votes where they teach nothing."""

from __future__ import annotations

import asyncio
import json
import math
from functools import partial

import pytest

from clawloop.app.processes.workers import try_new_judge
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.judging.prompts import AnswerForm
from clawloop.core.judging.quality import CALIBRATED, JudgeTrial, Quality
from clawloop.core.judging.voting import Vote
from clawloop.core.recipes.recipe import DEFAULT_RECIPE, WITHOUT_JUDGE, Recipe
from clawloop.core.settings import Settings
from db.judging.trials import PostgresTrialStore
from db.serving.directory import PostgresDirectoryStore
from db.training.recipes import read_recipe_of
from tests.judging.conftest import JUDGE_SECONDS, Bench, set_recipe, with_client, with_signal
from tests.verbs import clawloop

GOOD, BAD = (Quality(100, 0.7, kappa, {"thanks": (17, 15)}) for kappa in (0.6, 0.1))
BIASES: dict[Vote, float] = {1: -3.0, 0: 0.0, -1: 0.5}


async def keep_trial(bench: Bench, form: AnswerForm, found: Quality, biases: dict[Vote, float] | None) -> None:
    bench.judge.listed = {"id": "tiny", "root": "/no/such/folder", "max_model_len": 4096}
    bench.judge.rendered = ("a b", "a b")  # it never thinks
    async with with_client(bench, None, JUDGE_SECONDS) as asking:
        _, digest = await asking.judging._judge.identity("default")  # type: ignore[attr-defined]
    by_form = {"grammar": BAD, "examples": BAD, CALIBRATED: found}
    trial = JudgeTrial("tiny", digest, form, biases, by_form, found)
    store = PostgresTrialStore(bench.database)
    assert await store.trial(digest) is None
    await store.keep(trial)
    await store.keep(trial)
    assert await store.trial(digest) == trial


async def judge_one(bench: Bench) -> tuple[TurnOutcome | None, int | None, str]:
    first, second = bench.conversation("one", "No, wrong.")
    session = await bench.insert(first, second)
    async with with_client(bench, None, JUDGE_SECONDS, trials=PostgresTrialStore(bench.database).trial) as asking:
        (result,) = await asking.judge_turn(session, second)
    return result.outcome, result.verdict, result.why


async def test_a_judge_that_needs_examples_gets_them_and_its_biases(binary_bench: Bench) -> None:
    await keep_trial(binary_bench, AnswerForm.EXAMPLES, GOOD, BIASES)
    binary_bench.judge.direct = {"1": math.log(0.8), "-": math.log(0.15), "0": math.log(0.05)}
    outcome, verdict, why = await judge_one(binary_bench)
    assert (outcome, verdict) == (TurnOutcome.SAMPLED, -1)
    assert "direct vote" in why
    (request,) = binary_bench.judge.requests
    assert len(request["messages"]) == 26
    assert request["structured_outputs"] == {"choice": ["1", "0", "-1"]}
    (vote,) = binary_bench.rows("SELECT kind, raw FROM votes")
    kept = json.loads(vote["raw"])
    assert kept["-1"] - kept["1"] == pytest.approx(math.log(0.15 / 0.8) + 3.5)


async def test_a_judge_whose_votes_teach_nothing_is_asked_for_none(binary_bench: Bench) -> None:
    await keep_trial(binary_bench, AnswerForm.GRAMMAR, BAD, None)
    outcome, verdict, why = await judge_one(binary_bench)
    assert (outcome, verdict) == (TurnOutcome.UNJUDGED, None)
    assert "votes and hints are off: tiny agrees with labelled phrases by a kappa of 0.10, and 0.4 is needed" in why
    assert "choose another judge" in why
    assert binary_bench.judge.requests == []


@pytest.mark.parametrize("verdicts", [True, False])
async def test_a_judge_whose_votes_teach_nothing_is_asked_for_no_hint_either(
    binary_bench: Bench, verdicts: bool
) -> None:
    await keep_trial(binary_bench, AnswerForm.GRAMMAR, BAD, None)
    signal = DEFAULT_RECIPE.signal.model_copy(update={"verdicts": verdicts, "at_least_one": False})
    await set_recipe(binary_bench, DEFAULT_RECIPE.model_copy(update={"signal": signal}))
    _, verdict, why = await judge_one(binary_bench)
    assert verdict is None
    assert "no hint: the judge is too weak to be asked" in why
    assert why.count("votes and hints are off: tiny") == 1
    assert binary_bench.judge.requests == []


async def test_a_form_that_the_recipe_forces_is_asked_for_votes_all_the_same(binary_bench: Bench) -> None:
    await keep_trial(binary_bench, AnswerForm.GRAMMAR, BAD, None)
    await set_recipe(binary_bench, with_signal(judge_form="examples"))
    outcome, _, why = await judge_one(binary_bench)
    assert (outcome, "direct vote" in why) == (TurnOutcome.SAMPLED, True)
    assert len(binary_bench.judge.requests[0]["messages"]) == 26


async def test_a_judge_that_nobody_tried_is_asked_as_before(binary_bench: Bench) -> None:
    binary_bench.judge.listed = {"id": "tiny", "root": None, "max_model_len": 4096}
    binary_bench.judge.rendered = ("a b", "a b")
    outcome, _, _ = await judge_one(binary_bench)
    assert outcome is TurnOutcome.SAMPLED
    assert len(binary_bench.judge.requests[0]["messages"]) == 2


async def test_the_command_measures_a_judge_and_says_that_its_votes_are_off(binary_bench: Bench) -> None:
    bench = binary_bench
    bench.judge.listed = {"id": "tiny", "root": None, "max_model_len": 4096}
    bench.judge.rendered = ("a b", "a b")
    variables = {
        "DATABASE_URL": bench.url,
        "CLAWLOOP_JUDGE_URL": bench.judge.url,
        "CLAWLOOP_JUDGE_MODEL": "tiny",
        "CLAWLOOP_JUDGE_FORM": "auto",
    }
    done = await asyncio.to_thread(clawloop, "judge", "try", **variables)
    assert done.returncode == 0, done.stderr
    assert "form: grammar (model tiny, " in done.stdout
    assert "kappa 0.00, on 100 phrases that decided nothing" in done.stdout
    assert "votes and hints are off: tiny agrees with labelled phrases by a kappa of 0.00" in done.stdout
    kept = await PostgresTrialStore(bench.database).newest()
    assert kept is not None
    assert set(kept.by_form) == {"grammar", "examples", "examples, calibrated"}
    assert len(bench.judge.requests) == 100 + 56 + 100 + 100
    wrong = await asyncio.to_thread(clawloop, "judge", "try", __file__, **variables)
    assert (wrong.returncode, "is not TOML" in wrong.stderr) == (1, True)


async def test_a_judge_worker_tries_a_judge_that_it_does_not_know_once(binary_bench: Bench) -> None:
    bench = binary_bench
    bench.judge.listed = {"id": "tiny", "root": None, "max_model_len": 4096}
    bench.judge.rendered = ("a b", "a b")
    settings = Settings(judge_url=bench.judge.url, judge_model="tiny", judge_form="auto")
    directory = await PostgresDirectoryStore(bench.database).read()
    recipe_of = partial(read_recipe_of, bench.database)
    store = PostgresTrialStore(bench.database)
    await try_new_judge(settings, lambda: directory, store, recipe_of)
    assert await store.newest() is not None
    asked = len(bench.judge.requests)
    assert asked > 300
    await try_new_judge(settings, lambda: directory, store, recipe_of)
    assert len(bench.judge.requests) == asked


async def test_a_judge_that_thinks_is_left_to_the_command(binary_bench: Bench) -> None:
    bench = binary_bench
    bench.judge.listed = {"id": "tiny", "root": None, "max_model_len": 4096}
    bench.judge.rendered = ("a b <think> </think>", "a b <think>")
    settings = Settings(judge_url=bench.judge.url, judge_model="tiny", judge_form="auto")
    directory = await PostgresDirectoryStore(bench.database).read()
    recipe_of = partial(read_recipe_of, bench.database)
    await try_new_judge(settings, lambda: directory, PostgresTrialStore(bench.database), recipe_of)
    assert await PostgresTrialStore(bench.database).newest() is None
    assert bench.judge.requests == []


async def test_a_judge_that_no_policy_asks_is_not_tried(binary_bench: Bench) -> None:
    bench = binary_bench
    bench.judge.listed = {"id": "tiny", "root": None, "max_model_len": 4096}
    bench.judge.rendered = ("a b", "a b")
    await set_recipe(bench, WITHOUT_JUDGE)
    settings = Settings(judge_url=bench.judge.url, judge_model="tiny", judge_form="auto")
    directory, looked = await PostgresDirectoryStore(bench.database).read(), asyncio.Event()

    async def recipe_of(policy: str) -> Recipe:
        looked.set()
        return await read_recipe_of(bench.database, policy)

    trying = asyncio.create_task(
        try_new_judge(settings, lambda: directory, PostgresTrialStore(bench.database), recipe_of)
    )
    await looked.wait()
    await asyncio.sleep(0.2)
    assert not trying.done()
    trying.cancel()
    assert await PostgresTrialStore(bench.database).newest() is None
    assert bench.judge.requests == []
