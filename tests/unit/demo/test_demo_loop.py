"""The in-process demo obeys its gate: what is rejected leaves no trace but the count."""

from __future__ import annotations

import torch

from benchmarks.demo_learning import changed
from benchmarks.demo_loop import DemoLoop, learn
from clawloop.demo.location import model_path
from clawloop.demo.plan import PlannedRun
from clawloop.demo.recipes import Method, demo_recipe
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
