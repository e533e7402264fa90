"""What a person types after `clawloop demo run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawloop.demo.plan import Plan, plan
from clawloop.demo.recipes import Method, demo_recipe
from clawloop.errors import SetupError
from clawloop.recipe import load_recipe


def planned(
    seeds: str | None = None, seed: str | None = None, methods: str = "combined", interactions: int = 64
) -> Plan:
    return plan(seeds, seed, methods, interactions, paced=True, batch=8)


@pytest.mark.parametrize(
    ("seeds", "seed", "numbers"),
    [(None, None, [1]), (None, "7", [7]), ("3", None, [1, 2, 3]), ("9, 5,9", None, [9, 5]), (None, "0", [0])],
)
def test_seeds_are_one_a_count_or_a_list(seeds: str | None, seed: str | None, numbers: list[int]) -> None:
    assert [run.seed for run in planned(seeds, seed).runs] == numbers


def test_each_method_meets_each_seed_with_a_policy_of_its_own() -> None:
    runs = planned("2", methods="binary,opd").runs
    assert [(run.method, run.seed) for run in runs] == [
        (Method.BINARY, 1),
        (Method.BINARY, 2),
        (Method.OPD, 1),
        (Method.OPD, 2),
    ]
    assert len({run.policy for run in runs}) == 4
    assert runs[0].policy == "demo-1-binary"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"seed": "x"}, "--seed 'x': a seed is a whole number from 0 to 4294967295"),
        ({"seed": "-1"}, "--seed '-1': a seed is"),
        ({"seed": "4294967296"}, "--seed '4294967296': a seed is"),
        ({"seeds": "0"}, "--seeds 0: give how many seeds"),
        ({"seeds": "1,b"}, "--seeds 'b': a seed is"),
        ({"seeds": "101"}, "101 runs: at most 100"),
        ({"seeds": "2", "seed": "1"}, "--seed and --seeds: give one of them"),
        ({"methods": "grpo"}, "--methods 'grpo': use binary, opd, combined"),
        ({"methods": ""}, "--methods '': use binary"),
        ({"interactions": 0}, "--interactions 0: give 8 to 1000; a step takes 8 samples"),
        ({"interactions": 7}, "--interactions 7: give"),
        ({"interactions": 1001}, "--interactions 1001: give"),
    ],
)
def test_what_makes_no_sense_is_one_line_that_says_what_would(given: dict[str, object], says: str) -> None:
    with pytest.raises(SetupError) as raised:
        planned(**given)  # type: ignore[arg-type]
    assert str(raised.value).startswith(says)
    assert "\n" not in str(raised.value)


def test_methods_differ_by_what_they_ask_for_and_weigh() -> None:
    recipes = {method: demo_recipe(method) for method in Method}
    assert len({recipe.hash for recipe in recipes.values()}) == 3
    assert not recipes[Method.BINARY].needs_teacher
    assert recipes[Method.OPD].train.advantage.verdict_weight == 0
    assert recipes[Method.COMBINED].signal.hints
    assert recipes[Method.COMBINED].signal.verdicts


def test_the_combined_recipe_is_the_one_that_is_shown() -> None:
    shown = Path(__file__).resolve().parents[2] / "deploy" / "recipes" / "demo.toml"
    assert load_recipe(shown).hash == demo_recipe(Method.COMBINED).hash
