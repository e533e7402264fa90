"""Many policies on one trainer: nobody waits for a busier one's second step."""

from __future__ import annotations

from temporalio.client import Client

from tests.workflows.conftest import until
from tests.workflows.learning import Learner
from tests.workflows.shared_trainer import all_queued, shared_trainer

PEOPLE = 19
BATCHES = 4


async def test_a_batch_of_each_policy_comes_before_the_second_of_a_busy_one(client: Client) -> None:
    async with shared_trainer(client) as trainer:
        busy = Learner(client, trainer.add())
        busy.scripted.gate.clear()
        await busy.samples(BATCHES * busy.scripted.needed)
        await until(lambda: bool(trainer.turns))  # its first step is being computed
        others = [Learner(client, trainer.add()) for _ in range(PEOPLE)]
        for learner in others:
            await learner.samples(learner.scripted.needed)
        await all_queued(others)
        busy.scripted.gate.set()
        await until(lambda: len(trainer.turns) == PEOPLE + BATCHES)
        turns = [(turn.policy, turn.n) for turn in trainer.turns]
    assert turns[0] == (busy.policy, 1)
    assert sorted(turns[1 : PEOPLE + 1]) == sorted((learner.policy, 1) for learner in others)
    assert turns[PEOPLE + 1 :] == [(busy.policy, n) for n in range(2, BATCHES + 1)]


async def test_who_comes_later_waits_for_one_step_of_each_of_the_others(client: Client) -> None:
    async with shared_trainer(client) as trainer:
        busy, slow, late = (Learner(client, trainer.add()) for _ in range(3))
        slow.scripted.gate.clear()
        await busy.samples(busy.scripted.needed)
        await until(lambda: busy.scripted.head == 1)
        await slow.samples(slow.scripted.needed)
        await until(lambda: len(trainer.turns) == 2)  # the trainer is taken
        await busy.samples(2 * busy.scripted.needed)
        await all_queued([busy])
        await late.samples(late.scripted.needed)
        await all_queued([late])
        slow.scripted.gate.set()
        await until(lambda: len(trainer.turns) == 5)
        turns = [(turn.policy, turn.n) for turn in trainer.turns]
    assert turns[:2] == [(busy.policy, 1), (slow.policy, 1)]
    assert turns.index((late.policy, 1)) < turns.index((busy.policy, 3))  # the second had asked before it
