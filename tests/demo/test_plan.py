"""The options of `clawloop demo run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawloop.app.demo.plan import Plan, plan
from clawloop.app.demo.recipes import Method, demo_recipe
from clawloop.app.demo.world import Axis
from clawloop.core.errors import SetupError
from clawloop.core.recipes.recipe import DEFAULT_RECIPE, load_recipe


def planned(
    seeds: str | None = None,
    seed: str | None = None,
    methods: str | None = None,
    interactions: int | None = 64,
    flip: str | None = None,
    measure_every: int = 1,
    model: str | None = None,
) -> Plan:
    return plan(
        seeds, seed, methods, interactions, paced=True, batch=8, flip=flip, measure_every=measure_every, model=model
    )


@pytest.mark.parametrize(
    ("seeds", "seed", "numbers"),
    [(None, None, [1]), (None, "7", [7]), ("3", None, [1, 2, 3]), ("9, 5,9", None, [9, 5]), (None, "0", [0])],
)
def test_seeds_are_one_a_count_or_a_list(seeds: str | None, seed: str | None, numbers: list[int]) -> None:
    assert [run.seed for run in planned(seeds, seed).runs] == numbers


def test_all_methods_of_a_user_come_before_the_next_user() -> None:
    runs = planned("2", methods="binary,opd").runs
    assert [(run.method, run.seed) for run in runs] == [
        (Method.BINARY, 1),
        (Method.OPD, 1),
        (Method.BINARY, 2),
        (Method.OPD, 2),
    ]
    assert len({run.policy for run in runs}) == 4
    assert runs[0].policy == "demo-1-binary"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": "x"}, "--seed 'x': a seed is a whole number from 0 to 4294967295"),
        ({"seed": "-1"}, "--seed '-1': a seed is"),
        ({"seed": "4294967296"}, "--seed '4294967296': a seed is"),
        ({"seeds": "0"}, "--seeds 0: give how many seeds"),
        ({"seeds": "1,b"}, "--seeds 'b': a seed is"),
        ({"seeds": "101"}, "101 runs: at most 100"),
        ({"seeds": "2", "seed": "1"}, "--seed and --seeds: give one of them"),
        ({"methods": "grpo"}, "--methods 'grpo': use binary, opd, combined, hybrid"),
        ({"methods": ""}, "--methods '': use binary"),
        ({"interactions": 0}, "--interactions 0: give 8 to 1000; a step takes 8 samples"),
        ({"interactions": 7}, "--interactions 7: give"),
        ({"interactions": 1001}, "--interactions 1001: give"),
        ({"flip": "colour"}, "--flip 'colour': use code, length, tone, several with commas, or all"),
        ({"flip": "code,"}, "--flip '': use code"),
        ({"flip": "code", "interactions": 15}, "--flip with --interactions 15: give 16 or more; each half needs 8"),
        ({"measure_every": 0}, "--measure-every 0: give 1 for each version"),
    ],
)
def test_an_invalid_option_is_one_line_with_the_remedy(options: dict[str, object], message: str) -> None:
    with pytest.raises(SetupError) as raised:
        planned(**options)  # type: ignore[arg-type]
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("flip", "axes"),
    [(None, ()), ("code", (Axis.CODE,)), ("tone, code", (Axis.CODE, Axis.TONE)), ("all", tuple(Axis))],
)
def test_a_flip_names_axes_and_has_more_interactions(flip: str | None, axes: tuple[Axis, ...]) -> None:
    result = planned(flip=flip, interactions=None)
    assert (result.flip, result.interactions) == (axes, 192 if axes else 64)
    assert planned(flip=flip, interactions=16).interactions == 16


def test_a_model_is_taught_by_hindsight_and_the_toy_by_a_judge() -> None:
    with_model = planned(model="smollm2")
    assert ([run.method for run in with_model.runs], with_model.model) == ([Method.HINDSIGHT], "smollm2")
    assert planned(methods="hindsight", model="smollm2") == with_model
    assert ([run.method for run in planned().runs], planned().model) == ([Method.COMBINED], None)
    for methods, model in (("combined", "smollm2"), ("hindsight", None)):
        with pytest.raises(SetupError, match="with a pretrained model it is hindsight alone"):
            planned(methods=methods, model=model)
    with pytest.raises(SetupError, match="--flip: only with --quick"):
        planned(flip="all", model="smollm2")


def test_the_recipe_of_a_model_is_hindsight_but_for_the_gate() -> None:
    demo = demo_recipe(Method.HINDSIGHT)
    shipped = load_recipe(Path(__file__).resolve().parents[2] / "deploy" / "recipes" / "hindsight.toml")
    assert not demo.signal.asks_judge
    assert (demo.signal, demo.train) == (shipped.signal, shipped.train)
    assert demo.gate == shipped.gate.model_copy(update={"content_loss": 0.1})


def test_methods_differ_in_signals_and_advantages_alone() -> None:
    assert len({demo_recipe(method).hash for method in Method}) == len(Method)
    recipes = {method: demo_recipe(method) for method in Method if method is not Method.HINDSIGHT}
    assert not recipes[Method.BINARY].train.uses_hints
    assert recipes[Method.OPD].train.advantage.verdict_weight == 0
    assert recipes[Method.COMBINED].signal.hints
    assert recipes[Method.COMBINED].signal.verdicts
    assert recipes[Method.HYBRID].signal == recipes[Method.COMBINED].signal
    parts = {"advantage": None, "distillation": None, "loss": None}
    assert len({recipe.train.model_copy(update=parts).model_dump_json() for recipe in recipes.values()}) == 1
    token_alone = [recipes[method].train for method in recipes if method is not Method.HYBRID]
    assert all(train.loss == token_alone[0].loss for train in token_alone)
    assert all(train.distillation == token_alone[0].distillation for train in token_alone)


def test_the_demos_hybrid_is_the_default_at_another_pace() -> None:
    demo, default = demo_recipe(Method.HYBRID), DEFAULT_RECIPE
    assert demo.signal == default.signal
    of_the_toy = {"content_loss": demo.gate.content_loss, "general_probes": False}
    assert demo.gate == default.gate.model_copy(update=of_the_toy)
    assert demo.gate.content_loss < default.gate.content_loss < 1
    train = demo.train
    # What was measured on a pretrained model, and not on the toy, whose weights are few.
    optimiser = default.train.optimiser.model_copy(update={"lr": train.optimiser.lr, "epsilon": 1e-8})
    loss = default.train.loss.model_copy(update={"kl": 0.1})
    pace = {"batch_samples": train.batch_samples, "lora": train.lora, "optimiser": optimiser}
    assert default.train.model_copy(update=pace | {"loss": loss, "corrected_share": 0.0}) == train


def test_the_combined_recipe_is_deploy_recipes_demo_toml() -> None:
    shown = Path(__file__).resolve().parents[2] / "deploy" / "recipes" / "demo.toml"
    assert load_recipe(shown).hash == demo_recipe(Method.COMBINED).hash
