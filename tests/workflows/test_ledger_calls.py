"""Short calls of the ledger are made where the training workflow runs; one that fails waits on the ledger's queue."""

from __future__ import annotations

from collections import Counter

from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from tests.workflows.conftest import until
from tests.workflows.learning import Learner, ScriptedLearning, learning


async def queued(learner: Learner) -> Counter[str]:
    """How many activities of each kind went by a queue."""
    events = (await learner.handle.fetch_history()).events
    return Counter(
        event.activity_task_scheduled_event_attributes.activity_type.name
        for event in events
        if event.HasField("activity_task_scheduled_event_attributes")
    )


async def test_a_step_waits_for_no_queue_but_its_trainer_s(client: Client) -> None:
    scripted = ScriptedLearning()
    learner = Learner(client, scripted)
    async with learning(client, scripted):
        await learner.samples(2 * scripted.needed)
        await until(lambda: scripted.version == 2)
        # A version may be published together with the one before.
        assert (await queued(learner)).keys() == {"train_step", "publish_version"}
        assert (await queued(learner))["train_step"] == 2


async def test_while_postgresql_is_away_a_batch_is_claimed_by_the_queue_which_waits(client: Client) -> None:
    scripted = ScriptedLearning()
    scripted.claims_fail = [ApplicationError("PostgreSQL is away", type="StoreUnavailable")] * 4
    learner = Learner(client, scripted)
    async with learning(client, scripted):
        await learner.samples(scripted.needed)
        await until(lambda: scripted.version == 1)
        assert (await queued(learner))["claim_batch"] == 1
    assert scripted.happened.count("claim 1: 16") == 1
