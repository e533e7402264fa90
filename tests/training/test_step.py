"""One step against plain autograd over PEFT and transformers, and what it refuses to do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clawloop.core.contracts.training import BatchSample, StepFigures
from clawloop.core.errors import AdapterUnusable, NothingToTrain, SampleUnusable, StepDiverged
from clawloop.core.ids import new_episode_id
from clawloop.core.recipes.recipe import Advantage, Bounds, Distillation, Loss, Optimiser, Train
from clawloop.training.batch import plain_sequence
from clawloop.training.model.decoder import TorchtuneModel, load_torchtune_model
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, adapter_tensors
from clawloop.training.packing import Limits, collate
from clawloop.training.ranks import Progress
from clawloop.training.step import make_optimizer, train_step
from tests.training.plain_step import peft_model, plain_gradients, plain_logprobs
from tests.training.tiny import VOCAB, random_batch, random_sequences, sample_id, shake_adapter

CPU = torch.device("cpu")
FAR = sample_id(99)
WIDE = Limits(budget_tokens=4096, max_tokens=256, vocab_size=VOCAB)
UNCLIPPED = Optimiser(grad_clip=1e9)


def load(path: Path) -> TorchtuneModel:
    model = load_torchtune_model(path, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=CPU)
    shake_adapter(model)
    return model


def step(
    model: TorchtuneModel, samples: list[BatchSample], recipe: Train, limits: Limits = WIDE, parent: int = 1
) -> StepFigures:
    return train_step(model, make_optimizer(model, recipe.optimiser), samples, recipe, limits, parent=parent)


def gradients(model: TorchtuneModel) -> dict[str, Tensor]:
    """What the last step left, by PEFT's names."""
    found = {}
    for ours, parameter in model.adapter_parameters().items():
        assert parameter.grad is not None
        found[ours] = parameter.grad.clone()
    return found


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


@pytest.mark.parametrize("checkpoint", ["qwen3", "qwen2"])
@pytest.mark.parametrize(
    ("aggregation", "episodes"), [("token", False), ("sequence", False), ("sequence", True), ("token", True)]
)
def test_gradients_are_those_of_peft_and_transformers(
    checkpoint: str, aggregation: str, episodes: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base = request.getfixturevalue(checkpoint)
    model = load(base)
    recipe = Train(loss=Loss(kl=0.1, aggregation=aggregation), optimiser=UNCLIPPED)  # type: ignore[arg-type]
    samples = random_batch(model, hints=True)
    if episodes:  # of two and three turns, beside chats
        of_turn = [None, *[new_episode_id()] * 2, *[new_episode_id()] * 3]
        of_turn += [None] * (len(samples) - len(of_turn))
        samples = [replace(one, episode=episode) for one, episode in zip(samples, of_turn, strict=True)]
    expected, loss = plain_gradients(peft_model(model, base, tmp_path), samples, recipe)
    report = step(model, samples, recipe, Limits(budget_tokens=60, max_tokens=256, vocab_size=VOCAB))
    assert report.micro_batches > 2
    assert report.loss == pytest.approx(loss, rel=1e-5)
    assert relative_error(gradients(model), expected) < 1e-5


def test_the_token_budget_does_not_change_the_gradient(qwen3: Path) -> None:
    found = []
    for budget in (1, 50, 4096):
        model = load(qwen3)
        step(
            model,
            random_batch(model, hints=True),
            Train(optimiser=UNCLIPPED),
            Limits(budget_tokens=budget, max_tokens=256, vocab_size=VOCAB),
        )
        found.append(gradients(model))
    assert relative_error(found[0], found[2]) < 1e-5
    assert relative_error(found[1], found[2]) < 1e-5


def test_layers_computed_again_do_not_change_the_gradient(qwen3: Path) -> None:
    found = []
    for beyond in (0, None):
        model = load(qwen3)
        model.recompute_beyond = beyond
        step(model, random_batch(model), Train(optimiser=UNCLIPPED))
        found.append(gradients(model))
    assert relative_error(found[0], found[1]) < 1e-6


@pytest.mark.parametrize(("beyond", "times"), [(0, 2), (31, 2), (32, 1), (None, 1)])
def test_layers_of_a_small_micro_batch_are_computed_once(beyond: int | None, times: int, qwen3: Path) -> None:
    model = load_model(qwen3, LoraShape(), dtype=torch.float32, device=CPU, recompute_beyond=beyond)
    assert isinstance(model, TorchtuneModel)
    computed: list[object] = []
    model.layers[0].register_forward_pre_hook(lambda *_: computed.append(None))
    packed = collate(random_sequences([(9, 5), (3, 17)]), [0, 1])
    assert len(packed.tokens_S) == 32
    model(packed).logprobs_N.sum().backward()
    assert len(computed) == times


@pytest.mark.parametrize(("of", "divergence"), [("student", "reverse"), ("teacher", "reverse"), ("teacher", "forward")])
def test_distillation_follows_the_kl_over_top_k_and_tail(qwen3: Path, tmp_path: Path, of: str, divergence: str) -> None:
    model = load(qwen3)
    recipe = Train(
        loss=Loss(policy_gradient=0, distillation=1.0, kl=0),
        advantage=Advantage(verdict_weight=0, teacher_weight=0),
        distillation=Distillation.model_validate({"top_k": 5, "top_k_of": of, "divergence": divergence}),
        optimiser=UNCLIPPED,
    )
    samples = [sample for sample in random_batch(model, hints=True) if sample.hinted_prompts]
    peft = peft_model(model, qwen3, tmp_path)
    total = sum(len(sample.response_ids) for sample in samples)
    loss = torch.zeros(())
    for sample in samples:
        response = list(sample.response_ids)
        student = plain_logprobs(peft, list(sample.prompt_ids), response, sample.temperature)
        with torch.no_grad():
            taught = plain_logprobs(peft, list(sample.hinted_prompts[0]), response, sample.temperature)
        ids = (student if of == "student" else taught).detach().topk(5).indices
        rest = torch.ones_like(student, dtype=torch.bool).scatter(-1, ids, False)
        for known in (student, taught):
            assert known.exp().sum(-1).allclose(torch.ones(len(response)))
        p, q = (
            torch.cat([d.gather(-1, ids), d.masked_fill(~rest, -math.inf).logsumexp(-1, keepdim=True)], -1)
            for d in (student, taught)
        )
        if divergence == "forward":
            p, q = q, p
        loss = loss + (p.exp() * (p - q)).sum() / total
    loss.backward()  # type: ignore[no-untyped-call]
    named = dict(peft.named_parameters())
    expected = {name.replace(".default", ""): p.grad for name, p in named.items() if p.grad is not None}
    report = step(model, samples, recipe)
    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    assert relative_error(gradients(model), expected) < 1e-4


def test_a_distillation_step_takes_samples_with_and_without_hints(qwen3: Path) -> None:
    model = load(qwen3)
    samples = random_batch(model, hints=True)
    recipe = Train(loss=Loss(distillation=1.0), distillation=Distillation(top_k=5))
    report = step(model, samples, recipe)
    assert set(report.parts) == {"policy_gradient", "distillation", "kl"}
    assert set(report.samples) == {sample.sample_id for sample in samples}


def test_a_step_raises_the_probability_of_rewarded_replies_and_lowers_that_of_others(qwen3: Path) -> None:
    model = load(qwen3)
    samples = random_batch(model)
    recipe = Train(optimiser=Optimiser(lr=3e-3))
    before = step(model, samples, recipe)
    after = step(model, samples, recipe)
    for sample in samples:
        moved = (after.samples[sample.sample_id].ratio_mean or 0) - (before.samples[sample.sample_id].ratio_mean or 0)
        assert moved * (sample.reward or 0) > 0


def test_several_epochs_update_several_times_with_the_first_policy_as_anchor(qwen3: Path) -> None:
    moved = []
    for epochs in (1, 3):
        model = load(qwen3)
        before = adapter_tensors(model)
        recipe = Train(loss=Loss(correction="decoupled"), optimiser=Optimiser(lr=1e-3, epochs=epochs, weight_decay=0))
        optimizer = make_optimizer(model, recipe.optimiser)
        train_step(model, optimizer, random_batch(model), recipe, WIDE, parent=1)
        assert {float(state["step"]) for state in optimizer.state.values()} == {epochs}
        after = adapter_tensors(model)
        moved.append(sum(float((after[name] - before[name]).norm()) for name in before))
    assert moved[1] > 1.5 * moved[0]


def test_the_decoupled_correction_weights_tokens_by_prox_over_behaviour(qwen3: Path) -> None:
    model = load(qwen3)
    samples = random_batch(model)
    far = [logprob - 1.0 for logprob in samples[1].logprobs]
    samples[1] = replace(samples[1], logprobs=far)
    packed = collate([plain_sequence(sample) for sample in samples], range(len(samples)))
    with torch.no_grad():
        begins = packed.split(model(packed).logprobs_N)
    # As the step begins the ratio is 1, and nothing is clipped.
    weights = [
        (begins[index] - torch.tensor(sample.logprobs)).exp().clamp(max=2) for index, sample in enumerate(samples)
    ]
    expected = -sum(
        float(weight.sum()) * (sample.reward or 0) for weight, sample in zip(weights, samples, strict=True)
    ) / sum(map(len, weights))
    report = step(model, samples, Train(loss=Loss(kl=0, correction="decoupled")))
    assert report.loss == pytest.approx(expected, rel=1e-5)


def test_masked_tokens_are_not_trained(qwen3: Path) -> None:
    whole_model, masked_model = load(qwen3), load(qwen3)
    samples = random_batch(whole_model)
    masked = [
        BatchSample(
            sample_id=s.sample_id,
            prompt_ids=s.prompt_ids,
            response_ids=s.response_ids,
            logprobs=s.logprobs,
            temperature=s.temperature,
            version=1,
            reward=s.reward,
            response_mask=[place > 0 for place in range(len(s.response_ids))],
        )
        for s in samples
    ]
    whole_report = step(whole_model, samples, Train())
    masked_report = step(masked_model, masked, Train())
    alone = [s.sample_id for s in samples if len(s.response_ids) == 1]
    assert whole_report.tokens - masked_report.tokens == len(samples)
    assert list(masked_report.dropped) == alone
    assert "none is trained" in masked_report.dropped[alone[0]]


@pytest.mark.parametrize(
    ("bounds", "message"),
    [(Bounds(ratio=0.5), "mean ratio .* bound 0.5"), (Bounds(kl=1e-6), "mean KL to the base .* bound 1e-06")],
)
def test_a_step_over_a_bound_is_refused_before_the_optimiser_moves(bounds: Bounds, message: str, qwen3: Path) -> None:
    model = load(qwen3)
    before = adapter_tensors(model)
    optimizer = make_optimizer(model, Optimiser())
    with pytest.raises(StepDiverged, match=message):
        train_step(model, optimizer, random_batch(model), Train(bounds=bounds), WIDE, parent=1)
    assert not optimizer.state
    assert all(torch.equal(before[name], tensor) for name, tensor in adapter_tensors(model).items())


def test_a_number_that_is_not_finite_stops_the_step(qwen3: Path) -> None:
    model = load(qwen3)
    samples = random_batch(model)
    with torch.no_grad():
        next(iter(model.adapter_parameters().values()))[0, 0] = math.inf
    optimizer = make_optimizer(model, Optimiser())
    with pytest.raises(StepDiverged, match="not finite"):
        train_step(model, optimizer, samples, Train(), WIDE, parent=1)
    assert not optimizer.state


def test_explicit_feedback_far_from_the_policy_is_dropped_as_drifted(qwen3: Path) -> None:
    model = load(qwen3)
    samples = random_batch(model)
    far = [logprob - 1.5 for logprob in samples[0].logprobs]
    for explicit, drift in ((True, 1.0), (True, 2.0), (False, 1.0)):
        changed = BatchSample(
            sample_id=FAR,
            prompt_ids=samples[0].prompt_ids,
            response_ids=samples[0].response_ids,
            logprobs=far,
            temperature=samples[0].temperature,
            version=1,
            reward=1.0,
            explicit=explicit,
        )
        report = step(load(qwen3), [changed, *samples[1:]], Train(drift=drift))
        dropped = explicit and drift < 1.5
        assert (FAR in report.samples) is not dropped
        assert ("drifted: mean |log ratio| 1.5" in report.dropped.get(FAR, "")) is dropped


def test_a_batch_with_nothing_to_learn_from_raises(qwen3: Path) -> None:
    model = load(qwen3)
    sample = random_batch(model)[0]
    empty = BatchSample(
        sample_id=sample_id(0),
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        logprobs=sample.logprobs,
        temperature=sample.temperature,
        version=1,
        reward=None,
    )
    with pytest.raises(NothingToTrain, match="neither a verdict nor a hint"):
        step(model, [empty], Train())


def test_a_sample_whose_lengths_disagree_is_refused() -> None:
    sample = BatchSample(
        sample_id=sample_id(0),
        prompt_ids=[1],
        response_ids=[2, 3],
        logprobs=[-0.1],
        temperature=1.0,
        version=1,
        reward=1.0,
    )
    with pytest.raises(SampleUnusable, match="log-probs of length 1 for 2 response tokens"):
        plain_sequence(sample)


def test_the_version_that_answered_is_the_teacher(qwen3: Path) -> None:
    model = load(qwen3)
    samples = random_batch(model, hints=True, version=1)
    older = {name: tensor * 0.5 for name, tensor in adapter_tensors(model).items()}
    versions_read: list[int] = []

    def read_version(version: int) -> dict[str, Tensor]:
        versions_read.append(version)
        return older

    recipe = Train(optimiser=UNCLIPPED)
    found, ratios = {}, {}
    for case, parent in (("same", 1), ("older", 3)):
        model = load(qwen3)
        optimizer = make_optimizer(model, recipe.optimiser)
        report = train_step(model, optimizer, samples, recipe, WIDE, parent=parent, read_version=read_version)
        ratios[case] = report.ratio
        found[case] = gradients(model)
    assert versions_read == [1]
    assert ratios["older"] == ratios["same"], "what is trained is the parent, not the teacher"
    assert relative_error(found["older"], found["same"]) > 1e-3
    with pytest.raises(AdapterUnusable, match="version 1 is a teacher"):
        step(load(qwen3), samples, recipe, parent=3)


def test_the_base_model_can_be_the_teacher(qwen3: Path, tmp_path: Path) -> None:
    recipe = Train(advantage=Advantage(teacher="base"), optimiser=UNCLIPPED)
    model = load(qwen3)
    samples = random_batch(model, hints=True)
    expected, _ = plain_gradients(peft_model(model, qwen3, tmp_path), samples, recipe)
    step(model, samples, recipe)
    assert relative_error(gradients(model), expected) < 1e-5


@pytest.mark.parametrize(
    ("teacher", "before"), [("policy", ["reference", "teacher"]), ("base", ["reference and teacher", "answered"])]
)
def test_progress_is_reported_after_every_micro_batch(teacher: str, before: list[str], qwen3: Path) -> None:
    model = load(qwen3)
    reported: list[Progress] = []
    optimizer = make_optimizer(model, Optimiser())
    limits = Limits(budget_tokens=60, max_tokens=256, vocab_size=VOCAB)
    samples = random_batch(model, hints=True)
    recipe = Train(advantage=Advantage(teacher=teacher))  # type: ignore[arg-type]
    report = train_step(model, optimizer, samples, recipe, limits, parent=1, on_progress=reported.append)
    trained = [progress for progress in reported if progress.stage == "train"]
    assert [progress.done for progress in trained] == list(range(1, report.micro_batches + 1))
    assert {progress.of for progress in trained} == {report.micro_batches}
    assert list(dict.fromkeys(p.stage for p in reported)) == [*before, "train", "check"]
    left = [progress.pace.seconds_left for progress in reported if progress.pace is not None]
    assert len(left) == len(reported)
    assert left[-1] == 0  # what was counted as work is what was done
    assert all(seconds > 0 for seconds in left[:-1])
