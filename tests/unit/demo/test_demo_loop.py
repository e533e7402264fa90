"""The in-process demo obeys its gate: what is rejected leaves no trace but the count."""

from __future__ import annotations

import pytest
import torch

from benchmarks.demo_ablation import VARIANTS, interval, table
from benchmarks.demo_learning import changed
from benchmarks.demo_loop import DemoLoop, learn
from clawloop.demo.location import model_path
from clawloop.demo.plan import PlannedRun
from clawloop.demo.recipes import Method, demo_recipe
from clawloop.recipes.recipe import parse_recipe
from clawloop.training.model.adapter import adapter_tensors

RUN = PlannedRun(1, Method.COMBINED)


def test_versions_that_no_gate_lets_through_change_nothing_and_end_the_run() -> None:
    recipe = changed(demo_recipe(Method.COMBINED), ["gate.parent_distance=0.0000001", "gate.pause_after=2"])
    loop = DemoLoop(model_path(), recipe, RUN)
    before = adapter_tensors(loop.policy)
    served = loop.chats.served.model.model.layers[0].self_attn.q_proj.weight.clone()
    evaluations = list(learn(loop, 40, [], 1))
    assert [row.version for row in evaluations] == [0]
    assert [step.rejected is not None for step in loop.steps] == [True, True]
    assert loop.stopped is not None
    assert "distance to the parent" in loop.stopped
    assert not loop.optimizer.state_dict()["state"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter_tensors(loop.policy).items())
    assert torch.equal(loop.chats.served.model.model.layers[0].self_attn.q_proj.weight, served)
    (group,) = loop.optimizer.param_groups
    assert group["lr"] == recipe.train.optimiser.lr  # as saved before the second, halved step


def test_settings_are_changed_by_their_dotted_keys() -> None:
    recipe = changed(demo_recipe(Method.BINARY), ["train.optimiser.lr=0.5", "signal.baseline=mean", "signal.m=5"])
    assert (recipe.train.optimiser.lr, recipe.signal.baseline, recipe.signal.m) == (0.5, "mean", 5)


@pytest.mark.parametrize("variant", list(VARIANTS)[1:])
def test_each_ablation_is_a_recipe_of_its_own_that_contradicts_nothing(variant: str) -> None:
    plain = demo_recipe(Method.COMBINED)
    varied = changed(plain, VARIANTS[variant])
    assert varied.hash != plain.hash
    assert parse_recipe(varied.model_dump()) == varied


def test_ablations_are_compared_user_by_user() -> None:
    assert interval([0.1, 0.3]) == pytest.approx((0.2, 12.71 * 0.1))
    rows = [(1, "as it is", 0.5), (2, "as it is", 0.7), (1, "kl 0", 0.6), (2, "kl 0", 0.8), (3, "kl 0", 0.0)]
    lines = [
        {"variant": name, "run": {"seed": seed, "exact_least": 1.0, "evaluations": [{"match": 0.4}, {"match": match}]}}
        for seed, name, match in rows
    ]
    first, second = table(lines).splitlines()[2:]
    assert first.startswith("| as it is | 2 | 60.0% ± 127.1% |")
    assert second.startswith("| kl 0 | 2 | +10.0% ± 0.0% |")
