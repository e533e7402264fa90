"""Canaries in PostgreSQL: a share of the conversations, until verdicts or time decide."""

from __future__ import annotations

from activities.training.canaries import Canaries
from activities.training.notifier import TrainingNotifier
from clawloop.contracts.training import CheckName, CheckResult, TrainingState
from clawloop.recipes.recipe import Gate
from db.serving.directory import PostgresDirectoryStore
from db.training.canary import PostgresCanaryStore
from db.training.work_flag import PostgresWorkStore
from tests.contract.learning import POLICY, RECIPE, PostgresLearning, step
from tests.fakes.notifier import FakeWorkNotifier


async def begun(learning: PostgresLearning) -> PostgresCanaryStore:
    """Version 1 is a canary; version 0 answers the others."""
    await learning.set_recipe(RECIPE.model_copy(update={"gate": Gate(canary_share=0.25)}))
    await learning.add_engine("http://e1:8100")
    await step(learning, 1)
    return PostgresCanaryStore(learning.database)


def canaries(learning: PostgresLearning, store: PostgresCanaryStore) -> tuple[Canaries, FakeWorkNotifier]:
    notifier = FakeWorkNotifier()
    return Canaries(store, TrainingNotifier(PostgresWorkStore(learning.database), notifier)), notifier


async def judged(learning: PostgresLearning, version: int, sessions: int, verdict: int) -> None:
    """Sessions that this version answered, of one turn each."""
    await learning.add_samples(sessions, version=version)
    await learning.execute(
        "UPDATE judgements SET verdict = %s WHERE turn_id IN (SELECT id FROM turns WHERE version = %s)",
        verdict,
        version,
    )


async def test_a_canary_is_head_and_not_active_and_no_batch_is_claimed(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = await begun(learning)
    view = await learning.steps.status(POLICY)
    assert (view.head, view.version, view.canary, view.unpublished) == (1, 0, 1, False)
    assert (view.state, view.closed_seconds) == (TrainingState.WAITING, 60.0)
    assert view.reason.startswith("version 1 is a canary, and its verdicts have not decided yet; ")
    await learning.add_samples(4, version=1)
    assert (await learning.steps.claim(POLICY, 2)).state is None
    (policy,) = (await PostgresDirectoryStore(learning.database).read()).policies
    assert (policy.active, policy.canary, policy.canary_share) == (0, 1, 0.25)
    assert (await learning.operators.versions(POLICY))[1].state == "canary, head"
    assert await store.open() == [POLICY]
    assert await canaries(learning, store)[0].decide() == 0
    await learning.operators.pin(POLICY, 0)
    (policy,) = (await PostgresDirectoryStore(learning.database).read()).policies
    assert policy.canary is None


async def test_a_worse_canary_is_rolled_back(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = await begun(learning)
    await judged(learning, 1, 12, -1)
    await judged(learning, 0, 12, 1)
    deciding, notifier = canaries(learning, store)
    assert await deciding.decide() == 1
    assert notifier.policies == [POLICY]
    view = await learning.steps.status(POLICY)
    assert (view.head, view.version, view.canary, view.epoch) == (0, 0, None, 1)
    version = (await learning.operators.versions(POLICY))[1]
    assert version.state == "rolled back"
    (check,) = [check for check in version.gate if check.name is CheckName.CANARY]
    assert check.result is CheckResult.FAILED
    assert check.reason.startswith("worse: mean verdict -2.00")
    assert await store.decide(POLICY) is None


async def test_a_better_canary_becomes_the_version_of_all(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = await begun(learning)
    await judged(learning, 1, 12, 1)
    await judged(learning, 0, 12, -1)
    decision = await store.decide(POLICY)
    assert decision is not None
    assert decision.check.reason.startswith("better: ")
    view = await learning.steps.status(POLICY)
    assert (view.head, view.canary, view.unpublished, view.closed_seconds) == (1, None, True, None)


async def test_a_canary_without_traffic_ends_by_time(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    store = await begun(learning)
    await learning.execute("UPDATE policies SET canary_since = now() - interval '25 hours'")
    assert await canaries(learning, store)[0].decide() == 1
    (check,) = (await learning.operators.versions(POLICY))[1].gate
    assert (check.result, check.reason.partition(":")[0]) == (CheckResult.NOT_ENOUGH, "no traffic in 24 h")
    assert (await learning.steps.status(POLICY)).unpublished


async def test_a_roll_back_by_hand_ends_the_canary(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await begun(learning)
    view = await learning.operators.roll_back(POLICY, 0)
    assert (view.head, view.canary) == (0, None)


async def test_a_pinned_policy_has_no_canary(postgres_learning: PostgresLearning) -> None:
    learning = postgres_learning
    await learning.operators.pin(POLICY, 0)
    store = await begun(learning)
    assert await store.open() == []
