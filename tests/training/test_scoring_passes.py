"""The passes without gradient: one per version, with hinted prompts beside the plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clawloop.core.contracts.training import BatchSample, StepFigures
from clawloop.core.errors import SampleUnusable
from clawloop.core.recipes.recipe import Optimiser, Train
from clawloop.training import step as steps
from clawloop.training.batch import hinted_sequence, plain_sequence
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, adapter_tensors
from clawloop.training.packing import Limits
from clawloop.training.ranks import Progress
from clawloop.training.scoring import ScoringPass, hinted_member, place_of, plan_scoring_passes, shard_batch
from tests.training.tiny import (
    VOCAB,
    random_ids,
    random_sequences,
    relative_error,
    sample_id,
    session_batch,
    shake_adapter,
)

WIDE = Limits(budget_tokens=4096, max_tokens=256, vocab_size=VOCAB)


def sample(number: int, prompt: Sequence[int], hinted: Sequence[int] | None = None, *, version: int = 1) -> BatchSample:
    """Ten response tokens after a prompt."""
    return BatchSample(
        sample_id=sample_id(number),
        prompt_ids=prompt,
        response_ids=random_ids(10),
        logprobs=[-1.0] * 10,
        temperature=1.0,
        version=version,
        reward=1.0,
        hinted_prompts={} if hinted is None else {0: hinted},
    )


def recipe_of(**tables: dict[str, object]) -> Train:
    return Train.model_validate({"optimiser": Optimiser(grad_clip=1e9), **tables})


def tokens_of(samples: Sequence[BatchSample], limits: Limits, *passes: ScoringPass) -> int:
    """Tokens of all forwards of these passes."""
    shard = shard_batch(samples, limits, passes, rank=0, world_size=1)
    return sum(len(pack.tokens_S) for packs in shard.scored.values() for pack in packs)


def apart(passes: Sequence[ScoringPass]) -> tuple[ScoringPass, ...]:
    """The same, plain and hinted prompts each in a pass of their own, but where they are compared."""
    found: list[ScoringPass] = []
    for one in passes:
        if (one.plain or one.answered) and one.hinted and one.top_k is None:
            plain = replace(one, hinted=())
            found += [plain, replace(one, policy=False, reference=False, answered=())]
        else:
            found.append(one)
    return tuple(found)


# 3 has no hint.
BATCH = [
    sample(index, [1, 2], [1, 3, 2] if index < 3 else None, version=version)
    for index, version in enumerate((0, 0, 1, 2))
]
COMPARED: dict[str, object] = {"distillation": 1.0}


@pytest.mark.parametrize(
    ("tables", "parent", "expected"),
    [
        ({}, 1, [(0, "reference and teacher", (0, 1), None), (1, "teacher", (2,), None)]),
        ({"loss": {"kl": 0.0}}, 1, [(0, "teacher", (0, 1), None), (1, "teacher", (2,), None)]),
        # The version that answered reads its own answer; for the first two that is the base model.
        (
            {"advantage": {"teacher": "base"}},
            1,
            [(0, "reference and teacher", (0, 1, 2), None), (1, "answered", (), None)],
        ),
        ({"advantage": {"teacher_weight": 0.0}}, 1, [(0, "reference", (), None)]),
        (
            {"loss": {"correction": "decoupled"}},
            1,
            [(1, "policy and teacher", (2,), None), (0, "reference and teacher", (0, 1), None)],
        ),
        (
            {"loss": {"correction": "decoupled"}},
            0,
            [(0, "policy and reference and teacher", (0, 1), None), (1, "teacher", (2,), None)],
        ),
        (
            {"loss": COMPARED, "distillation": {"top_k": 5, "top_k_of": "teacher"}},
            1,
            [(0, "reference and teacher", (0, 1), 5), (1, "teacher", (2,), 5)],
        ),
        # Their ids are found in the same pass.
        (
            {"loss": COMPARED, "distillation": {"top_k": 5}},
            1,
            [(0, "reference and teacher", (0, 1), 5), (1, "teacher", (2,), 5)],
        ),
    ],
)
def test_documents_scored_under_the_same_weights_form_one_pass(
    tables: dict[str, dict[str, object]], parent: int, expected: list[tuple[int, str, tuple[int, ...], int | None]]
) -> None:
    found = plan_scoring_passes(BATCH, recipe_of(**tables), parent)
    assert [(one.version, one.stage, tuple(place_of(m)[0] for m in one.hinted), one.top_k) for one in found] == expected


def test_explicit_feedback_is_scored_by_the_policy_together_with_its_hints() -> None:
    explicit = [*BATCH[:3], replace(BATCH[3], explicit=True)]
    assert [one.stage for one in plan_scoring_passes(explicit, recipe_of(loss={"kl": 0.0}), 1)] == [
        "policy and teacher",
        "teacher",
    ]


def test_a_hinted_prompt_shares_the_prefix_of_its_plain_prompt() -> None:
    ids = random_ids(90)
    lasting, volatile, hint = ids[:60], ids[60:70], ids[70:90]
    samples = [sample(0, [*lasting, *volatile], [*lasting, *hint, *volatile])]
    joined = ScoringPass(version=0, reference=True, hinted=(hinted_member(0),))
    # The last of ten response tokens is predicted, never read.
    assert tokens_of(samples, WIDE, *apart([joined])) == (70 + 9) + (90 + 9)
    assert tokens_of(samples, WIDE, joined) == 60 + (10 + 9) + (30 + 9)


def test_a_joined_pass_over_a_session_computes_little_more_than_its_hints(qwen3: Path) -> None:
    model = load_model(qwen3, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
    samples = session_batch(model)
    joined, _ = plan_scoring_passes(samples, recipe_of(advantage={"teacher": "base"}), 1)
    plain, hinted = (tokens_of(samples, WIDE, one) for one in apart([joined]))
    # A turn's own tokens, from the hint on: 5 of the hint, 6 of a volatile end, 8 of the response.
    assert tokens_of(samples, WIDE, joined) == plain + 5 * (5 + 6 + 8) + sum(5 + 3 + member for member in range(3))
    assert tokens_of(samples, WIDE, joined) < 0.8 * (plain + hinted)
    assert tokens_of(samples, replace(WIDE, share_prefixes=False), joined) == sum(
        plain_sequence(one).input_tokens + hinted_sequence(one).input_tokens for one in samples
    )


def test_without_common_prefixes_a_joined_pass_costs_as_much_as_two() -> None:
    prompts = [one.prompt_ids for one in random_sequences([(20, 1), (15, 1), (30, 1), (25, 1)])]
    samples = [sample(0, prompts[0], prompts[1]), sample(1, prompts[2], prompts[3])]
    joined, plain = (
        ScoringPass(version=0, reference=True, hinted=(hinted_member(0), hinted_member(1))),
        ScoringPass(version=1, policy=True),
    )
    limits = replace(WIDE, budget_tokens=80)
    assert tokens_of(samples, limits, joined) == tokens_of(samples, limits, *apart([joined]))
    shard = shard_batch(samples, limits, (joined, plain), rank=0, world_size=1)
    assert shard.scored[plain] is shard.trained
    assert sorted(m for pack in shard.scored[joined] for m in pack.members) == [
        hinted_member(1),
        hinted_member(0),
        0,
        1,
    ]
    assert all(len(pack.tokens_S) <= limits.budget_tokens for pack in shard.scored[joined])
    assert len(shard.scored[joined]) == 2


@pytest.mark.parametrize("plain", [True, False])
def test_an_unusable_hinted_prompt_is_named(plain: bool) -> None:
    samples = [sample(0, [1, 2], [1, 2, 3]), sample(1, [1, 2], [VOCAB])]
    passes = [ScoringPass(version=0, reference=plain, hinted=(hinted_member(0), hinted_member(1)))]
    with pytest.raises(SampleUnusable, match=f"{sample_id(1)} with hint: token ids"):
        shard_batch(samples, WIDE, passes, rank=0, world_size=1)


BASE_TEACHES: dict[str, object] = {"teacher": "base"}
CASES: dict[str, dict[str, dict[str, object]]] = {
    "combined": {},
    "combined, base": {"advantage": BASE_TEACHES},
    "opd, base": {"advantage": {**BASE_TEACHES, "verdict_weight": 0.0}},
    "decoupled": {"loss": {"correction": "decoupled"}},
    "topk": {"loss": COMPARED, "distillation": {"top_k": 5}},
    "hybrid by token": {
        "loss": COMPARED,
        "distillation": {"top_k": 5, "divergence": "clipped", "hint_choice": "token_optimal", "top_k_of": "overlap"},
    },
    "topk of teacher, decoupled": {
        "loss": {**COMPARED, "correction": "decoupled"},
        "distillation": {"top_k": 5, "top_k_of": "teacher"},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_neither_joining_passes_nor_sharing_prefixes_changes_a_step(
    case: str, qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hints of version 0, of the parent and of one between; some samples without one, one of explicit feedback."""
    recipe = recipe_of(**CASES[case])

    def train(*, joins: bool, shares: bool) -> tuple[StepFigures, dict[str, torch.Tensor], list[str]]:
        model = load_model(qwen3, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
        shake_adapter(model)
        older = {name: tensor * 0.5 for name, tensor in adapter_tensors(model).items()}
        samples = [
            replace(
                one,
                version=(0, 3, 2)[index % 3],
                hinted_prompts={} if index == 4 else one.hinted_prompts,
                explicit=index == 6,
            )
            for index, one in enumerate(session_batch(model))
        ]
        reported: list[Progress] = []
        named: dict[str, Any] = {"parent": 3, "read_version": lambda _: older, "on_progress": reported.append}
        limits = Limits(200, 256, VOCAB, share_prefixes=shares)
        with monkeypatch.context() as patch:
            if not joins:
                patch.setattr(steps, "plan_scoring_passes", lambda *given: apart(plan_scoring_passes(*given)))
            report = steps.train_step(
                model, steps.make_optimizer(model, recipe.optimiser), samples, recipe, limits, **named
            )
        gradients = {name: p.grad.clone() for name, p in model.adapter_parameters().items() if p.grad is not None}
        return report, gradients, [progress.stage for progress in reported]

    report, gradients, stages = train(joins=True, shares=True)
    plain_report, plain_gradients, plain_stages = train(joins=False, shares=False)
    assert any(stage.endswith(" and teacher") for stage in stages)
    assert any(stage.endswith(" and teacher") for stage in plain_stages) == (recipe.loss.distillation > 0)
    assert report.loss == pytest.approx(plain_report.loss, abs=1e-5)
    assert report.dropped.keys() == plain_report.dropped.keys()
    assert relative_error(gradients, plain_gradients) < 1e-5
    assert relative_error(train(joins=True, shares=False)[1], plain_gradients) < 1e-5
