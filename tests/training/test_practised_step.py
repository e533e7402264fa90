"""A step on practised replies, as PostgreSQL has them: the policy comes nearer to what it says with the lesson."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from activities.practice import PracticeActivities
from clawloop.core.contracts.training import StepState
from clawloop.core.lessons.practice import Practice, PractisedReply
from clawloop.core.recipes.recipe import CONTROL
from clawloop.training.adapters.files import read_adapter
from clawloop.training.model.decoder import TorchtuneModel, load_torchtune_model
from clawloop.training.model.port import LoraShape, set_adapter
from clawloop.training.packing import TokenSequence, collate
from clawloop.training.ranks import ignore_status
from clawloop.training.step_runner import StepRunner
from db.invariants import violations
from db.lessons.practice import PostgresPracticeStore
from db.training.gate import PostgresGateStore
from db.training.status import PostgresTrainingBrowser
from db.training.steps import PostgresStepStore
from tests.judging.conftest import bench, judge
from tests.judging.test_practice import BRIEF, Gym, gym, practising
from tests.training.steps import completed, never, setup_of
from tests.training.tiny import save_checkpoint

__all__ = ["bench", "gym", "judge"]

LORA = LoraShape(practising().train.lora.rank, practising().train.lora.alpha)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base"), positions=512)


def loaded(base: Path) -> TorchtuneModel:
    return load_torchtune_model(base, LORA, dtype=torch.float32, device=torch.device("cpu"), recompute_beyond=None)


@torch.no_grad()
def log_probs(model: TorchtuneModel, prompt: list[int], reply: list[int]) -> Tensor:
    """Of every token at each of the reply's positions, [T, V]."""
    packed = collate([TokenSequence("one", prompt, reply, 1.0)], [0])
    return model.logits(model.hidden_states(packed)[packed.rows_N]).double().log_softmax(-1)


async def test_a_step_on_practised_replies_learns_what_the_lesson_makes_the_policy_say(
    gym: Gym, base: Path, tmp_path: Path
) -> None:
    model = loaded(base)
    answer = gym.engine.answer

    async def answered(practice: Practice) -> PractisedReply | None:
        """As an engine with this model would: the recorded log-probs are its own."""
        reply = await answer(practice)
        assert reply is not None
        ids = list(reply.record.response_ids or ())
        said_TV = log_probs(model, list(reply.record.prompt_ids or ()), ids)
        logprobs = [float(row_V[token]) for row_V, token in zip(said_TV, ids, strict=True)]
        sampling = {**reply.record.sampling, "temperature": 1.0}
        return replace(reply, record=replace(reply.record, logprobs=logprobs, sampling=sampling))

    gym.activities = PracticeActivities(
        PostgresPracticeStore(gym.bench.database), answered, gym.engine.render, gym.bench.work
    )
    turns = gym.bench.conversation("one", "two", "three", "four")
    await gym.bench.insert(*turns)
    assert (await gym.practise()).requests == 4
    steps = PostgresStepStore(gym.bench.database)
    assert (await steps.claim("default", 1)).state is StepState.CLAIMED
    batch = await steps.batch("default", 1)
    trained = completed(StepRunner(setup_of(base, tmp_path)).train(batch, ignore_status, never))

    before_after: list[tuple[float, float]] = []
    learned = loaded(base)
    set_adapter(learned, read_adapter(tmp_path / trained.version.path).tensors)
    for sample in batch.samples:
        reply = list(sample.response_ids)
        plain_TV = log_probs(model, list(sample.prompt_ids), reply)
        with_lesson_TV, control_TV = (log_probs(model, list(sample.hinted_prompts[at]), reply) for at in (0, CONTROL))
        teacher_TV = (plain_TV + with_lesson_TV - control_TV).log_softmax(-1)
        distances = [
            float((teacher_TV.exp() * (teacher_TV - said_TV)).sum())
            for said_TV in (plain_TV, log_probs(learned, list(sample.prompt_ids), reply))
        ]
        before_after.append((distances[0], distances[1]))
    assert sum(after for _, after in before_after) < sum(before for before, _ in before_after), before_after

    assert await steps.commit(batch, trained) is StepState.CANDIDATE
    assert (await PostgresGateStore(gym.bench.database).accept("default", 1))[0] is StepState.COMMITTED
    shown = await PostgresTrainingBrowser(gym.bench.database).batch("default", 1)
    assert {reply.practice_of for reply in shown} == {turn.turn_id for turn in turns}
    assert {(hint.text, hint.source, hint.share) for reply in shown for hint in reply.hints} == {
        (BRIEF, "lessons", 1.0)
    }
    assert [reply.dropped or reply.without_hint for reply in shown] == [None] * 4
    assert await violations(gym.bench.database) == []
