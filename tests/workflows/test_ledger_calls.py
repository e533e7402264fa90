"""Short calls of the ledger are made where the training workflow runs; one that fails waits on the ledger's queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta

import pytest
from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from activities.training.steps import ClaimBatch
from clawloop.app.temporal.server import UPDATE_LIMIT
from clawloop.core.contracts.training import Claim
from tests.workflows.conftest import until
from tests.workflows.learning import Learner, ScriptedLearning, learning, orchestrating, training
from workflows.activity_options import LOCAL_STORE


class Hanging(ScriptedLearning):
    """A claim where the workflow runs gets no answer.

    Attributes:
        hung: how many did.
    """

    hung = 0

    @activity.defn(name="claim_batch")
    async def claim(self, ask: ClaimBatch) -> Claim:
        if activity.info().is_local:
            self.hung += 1
            await asyncio.Event().wait()
        return await super().claim(ask)


async def queued(learner: Learner) -> Counter[str]:
    """How many activities of each kind went by a queue."""
    events = (await learner.handle.fetch_history()).events
    return Counter(
        event.activity_task_scheduled_event_attributes.activity_type.name
        for event in events
        if event.HasField("activity_task_scheduled_event_attributes")
    )


async def test_a_step_waits_for_no_queue_but_its_trainer_s(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOCAL_STORE, "start_to_close_timeout", timedelta(seconds=60))  # on a busy machine
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


def test_a_call_is_given_up_before_an_operator_s_update_is() -> None:
    assert LOCAL_STORE["retry_policy"].maximum_attempts == 1
    assert LOCAL_STORE["start_to_close_timeout"] < UPDATE_LIMIT


async def test_an_operator_s_update_is_answered_though_a_call_hangs(client: Client) -> None:
    hanging = Hanging()
    learner = Learner(client, hanging)
    async with learning(client, hanging):
        await learner.samples(hanging.needed)
        await until(lambda: hanging.hung > 0)
        await learner.set_recipe(hanging.needed)
        await until(lambda: hanging.version == 1)
        assert (await queued(learner))["claim_batch"] >= 1
    assert hanging.happened.count("claim 1: 16") == 1


async def test_a_call_that_hangs_while_its_worker_stops_is_made_by_the_next_one_on_the_queue(client: Client) -> None:
    hanging = Hanging()
    learner = Learner(client, hanging)
    async with training(client, hanging):
        async with orchestrating(client, hanging.where_workflows_run, hanging.on_the_queue):
            await learner.samples(hanging.needed)
            await until(lambda: hanging.hung > 0)
        async with learning(client, hanging, trainer=False):
            await until(lambda: hanging.version == 1)
            assert (await queued(learner))["claim_batch"] >= 1
    assert hanging.happened.count("claim 1: 16") == 1
