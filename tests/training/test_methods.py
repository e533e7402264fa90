"""Every recipe's step against plain autograd over PEFT and transformers, and what must not change it."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

from clawloop.core.contracts.training import BatchSample, StepFigures
from clawloop.core.recipes.recipe import CONTROL, Train
from clawloop.training.adapters.files import Adapter, BaseIdentity, adapter_files, write_version
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, PolicyModel, adapter_tensors
from clawloop.training.packing import Limits
from clawloop.training.step import make_optimizer, train_step
from tests.training.methods import LIMITS, METHODS, batch_of, train_part
from tests.training.tiny import VOCAB, reference_model, relative_error, shake_adapter


def unclipped(method: str) -> Train:
    """The recipe, so that what its step leaves is the gradient of the loss: whole, of all samples, of the model as
    given."""
    train = train_part(method, grad_clip=1e9, epochs=1)
    unbound = train.distillation.model_copy(update={"hint_distance": None})  # which random weights exceed
    return train.model_copy(update={"distillation": unbound})


def load(path: Path) -> PolicyModel:
    model = load_model(path, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
    shake_adapter(model)
    return model


def gradients_of_step(
    base: Path, samples: list[BatchSample], recipe: Train, limits: Limits = LIMITS
) -> tuple[dict[str, Tensor], StepFigures]:
    """What one step leaves, by PEFT's names."""
    model = load(base)
    report = train_step(model, make_optimizer(model, recipe.optimiser), samples, recipe, limits, parent=1)
    return {ours: p.grad.clone() for ours, p in model.adapter_parameters().items() if p.grad is not None}, report


def plain_step(base: Path, folder: Path, samples: list[BatchSample], recipe: Train) -> tuple[dict[str, Tensor], float]:
    """A step by the formulas of docs/learning.md, one sample at a time and unpadded; only file readers are shared."""
    model = load(base)
    identity = BaseIdentity(name="tiny", fingerprint="")
    files = adapter_files(Adapter(model.lora, adapter_tensors(model), identity))
    written = write_version(folder, 1, files)
    peft: nn.Module = PeftModel.from_pretrained(reference_model(base), str(written.path), is_trainable=True).eval()
    total = sum(len(sample.response_ids) for sample in samples)
    loss = torch.zeros(())
    for sample in samples:
        loss = loss + _plain_loss(peft, sample, recipe).sum() / total
    loss.backward()  # type: ignore[no-untyped-call]
    named = dict(peft.named_parameters())
    found = {name.replace(".default", ""): p.grad for name, p in named.items() if p.grad is not None}
    return found, float(loss.detach())


def _plain_loss(peft: nn.Module, sample: BatchSample, recipe: Train) -> Tensor:
    response = torch.tensor(sample.response_ids)[:, None]

    def distribution(prompt: list[int]) -> Tensor:
        ids = torch.tensor([[*prompt, *sample.response_ids]])
        logits: Tensor = peft(ids).logits[0, len(prompt) - 1 : -1]
        return (logits / sample.temperature).log_softmax(-1)

    def likeliest(distribution_TV: Tensor) -> list[set[int]]:
        return [set(row) for row in distribution_TV.topk(recipe.distillation.top_k).indices.tolist()]

    student = distribution(list(sample.prompt_ids))
    own, mu = student.gather(-1, response)[:, 0], torch.tensor(sample.logprobs)
    teacher = None
    with torch.no_grad():
        with peft.disable_adapter():  # type: ignore[operator]
            reference = distribution(list(sample.prompt_ids)).gather(-1, response)[:, 0]
        if sample.hinted_prompts:
            prompts = sorted(item for item in sample.hinted_prompts.items() if item[0] != CONTROL)
            teachers = [distribution(list(prompt)) for _, prompt in prompts]
            if recipe.advantage.control:
                by_control = student - distribution(list(sample.hinted_prompts[CONTROL]))
                teachers = [(one + by_control).log_softmax(-1) for one in teachers]
            teacher = teachers[0]
            if recipe.loss.distillation and recipe.distillation.hint_choice == "sequence_optimal":
                own_ids = likeliest(student)
                teacher = max(
                    teachers, key=lambda one: sum(len(a & b) for a, b in zip(own_ids, likeliest(one), strict=True))
                )
    loss = recipe.loss.kl * (own - mu).exp().clamp(0, 2).detach() * (own - reference).square() / 2
    decoupled = recipe.loss.correction == "decoupled"
    began = own.detach()  # of one epoch, so that the step begins with the student's
    rho, weight = (own - (began if decoupled else mu)).exp(), (began - mu).exp().clamp(max=2) if decoupled else 1.0
    advantage = recipe.advantage.verdict_weight * torch.full_like(mu, sample.reward or 0.0)
    if teacher is not None:
        # The step's parent answered, so its own log-prob is the student's at the step's begin.
        gap = (teacher.gather(-1, response)[:, 0] - own.detach()).clamp(-2, 2)
        advantage = advantage + recipe.advantage.teacher_weight * gap
        if recipe.loss.distillation:
            whose = student.detach() if recipe.distillation.top_k_of == "student" else teacher
            ids = whose.topk(recipe.distillation.top_k).indices
            loss = loss + recipe.loss.distillation * _over_ids(student, teacher, ids, recipe)
    if recipe.loss.policy_gradient:
        spared = 1 - recipe.advantage.spare_unlikely * (1 - mu.exp())
        advantage = torch.where(advantage < 0, advantage * spared, advantage)
        objective = torch.minimum(rho * advantage, rho.clamp(0.8, 1.28) * advantage)
        loss = loss - weight * torch.where(advantage < 0, torch.maximum(objective, 3 * advantage), objective)
    return loss


def _over_ids(student: Tensor, teacher: Tensor, ids: Tensor, recipe: Train) -> Tensor:
    if recipe.distillation.divergence == "clipped":
        old, cap = student.detach().gather(-1, ids), recipe.advantage.opd_clip
        share, gap = old.softmax(-1), teacher.gather(-1, ids) - old
        if recipe.advantage.centre_gap:
            gap = gap - (share * gap).sum(-1).mean()
        of_id = share * gap.clamp(-cap, cap)
        by_ratio = (student.gather(-1, ids) - old).exp()
        return -torch.minimum(by_ratio * of_id, by_ratio.clamp(0.8, 1.28) * of_id).sum(-1)
    inside = torch.zeros_like(student, dtype=torch.bool).scatter(-1, ids, True)
    p, q = (
        torch.cat([d.gather(-1, ids), d.masked_fill(inside, -math.inf).logsumexp(-1, keepdim=True)], -1)
        for d in (student, teacher)
    )
    if recipe.distillation.divergence == "forward":
        p, q = q, p
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("checkpoint", ["qwen3", "qwen2"])
@pytest.mark.parametrize("method", METHODS)
def test_a_methods_gradient_is_that_of_peft_and_transformers(
    method: str, checkpoint: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base = request.getfixturevalue(checkpoint)
    recipe = unclipped(method)
    samples = batch_of(method, load(base))
    expected, loss = plain_step(base, tmp_path, samples, recipe)
    found, report = gradients_of_step(base, samples, recipe)
    assert not report.dropped
    assert report.micro_batches > 1
    assert report.loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_neither_order_nor_packing_changes_a_methods_gradient(method: str, qwen3: Path) -> None:
    recipe = unclipped(method)
    samples = batch_of(method, load(qwen3))
    straight, _ = gradients_of_step(qwen3, samples, recipe)
    shuffled, _ = gradients_of_step(qwen3, [samples[index] for index in (3, 6, 0, 7, 2, 5, 1, 4)], recipe)
    assert relative_error(shuffled, straight) < 1e-5
    for budget, share in ((1, True), (4096, True), (200, False)):
        packed, _ = gradients_of_step(qwen3, samples, recipe, Limits(budget, 256, VOCAB, share_prefixes=share))
        assert relative_error(packed, straight) < 1e-5


def test_every_methods_loss_reaches_the_adapter(qwen3: Path) -> None:
    """The system we follow trains every method as plain RL once LoRA is on."""
    samples = batch_of("combined", load(qwen3))
    both = [sample for sample in samples if sample.reward and sample.hinted_prompts]
    assert len(both) > 1
    # Some differ in the reward alone, which is not the step's, or in its pace.
    terms = {method: unclipped(method) for method in METHODS}
    methods = {(str(train.advantage), str(train.loss), str(train.distillation)): name for name, train in terms.items()}
    assert len(methods) >= 5
    found = {method: gradients_of_step(qwen3, both, unclipped(method))[0] for method in methods.values()}
    for one, other in combinations(found, 2):
        assert relative_error(found[one], found[other]) > 0.01, (one, other)
