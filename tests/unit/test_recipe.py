"""Recipes: every shipped one loads; hashes are of content; what cannot be meant is refused by name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from clawloop.core.errors import RecipeRejected
from clawloop.core.recipes import table
from clawloop.core.recipes.recipe import (
    Advantage,
    Gate,
    Loss,
    Optimiser,
    Recipe,
    Train,
    load_recipe,
    parse_recipe,
    parse_stored_recipe,
    read_recipe,
)
from clawloop.core.recipes.table import Table

RECIPES = sorted((Path(__file__).parents[2] / "deploy" / "recipes").glob("*.toml"))

BINARY = """
name = "x"
[signal]
hints = false
[train.advantage]
teacher_weight = 0.0
"""

TOP_K = """
name = "x"
[signal]
verdicts = false
at_least_one = false
[train.advantage]
verdict_weight = 0.0
teacher_weight = 0.0
[train.loss]
policy_gradient = 0.0
distillation = 1.0
"""


def test_a_recipe_is_shipped_for_each_known_method() -> None:
    names = {path.stem for path in RECIPES}
    assert names >= {"binary", "opd", "combined", "topk", "grpo", "outcome_process"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads(path: Path) -> None:
    assert load_recipe(path).name == path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_stored_recipe_is_read_back_unchanged(path: Path) -> None:
    recipe = load_recipe(path)
    stored = json.loads(json.dumps(recipe.model_dump(mode="json")))
    assert parse_recipe(stored) == recipe
    assert parse_recipe(stored).hash == recipe.hash


def test_the_combined_recipe_is_the_default() -> None:
    combined = next(load_recipe(path) for path in RECIPES if path.stem == "combined")
    spared = Train(
        advantage=Advantage(spare_unlikely=1.0), loss=Loss(kl=0.1), optimiser=Optimiser(beta1=0.5, grad_clip=0.05)
    )
    assert combined == Recipe(
        name="combined", train=spared, gate=Gate(held_out=0.1, content_loss=0.05, lr_backoff=0.25)
    )
    assert (combined.train.uses_rewards, combined.train.uses_hints) == (True, True)


def test_no_two_shipped_recipes_have_the_same_hashes() -> None:
    parts = [(recipe.signal.hash, recipe.train.hash) for recipe in map(load_recipe, RECIPES)]
    assert len(set(parts)) == len(parts)


def test_the_hash_depends_on_the_content_and_not_on_its_spelling() -> None:
    one = read_recipe('name = "x"\n[train]\nbatch_samples = 8\nstaleness_versions = 2\n[train.loss]\nkl = 1\n')
    other = read_recipe(
        'name = "x"\n[train.loss]\nkl = 1.0  # the same\n'
        "[train]\nstaleness_versions = 2\nbatch_samples = 8\n[signal]\nm = 3\n"
    )
    assert one.hash == other.hash
    assert one.signal.hash == other.signal.hash
    assert re.fullmatch(r"[0-9a-f]{64}", one.hash)


def test_the_hash_stays_the_same_from_release_to_release() -> None:
    # Samples wait in the store under these: when a change here is meant, waiting samples expire.
    assert Recipe(name="combined").signal.hash[:12] == "dfe1d7ba3ef8"
    assert Recipe(name="combined").hash[:12] == "3ccc0d5ad22c"
    grpo = next(load_recipe(path) for path in RECIPES if path.stem == "grpo")  # the one with [signal.overlong]
    assert grpo.signal.hash[:12] == "457c057b86a4"


HASHES = {
    "binary": ("bd1fc7c9a35c", "bd020ab0688f"),
    "combined": ("dfe1d7ba3ef8", "3edbc31c4ce1"),
    "demo": ("dfe1d7ba3ef8", "2f82be770126"),
    "grpo": ("457c057b86a4", "bd020ab0688f"),
    "judge": ("065925e6c6d8", "bd020ab0688f"),
    "opd": ("de2b815b2dae", "14dfd19fced7"),
    "outcome_process": ("34e05196c3d5", "bd020ab0688f"),
    "quantised": ("dfe1d7ba3ef8", "90a6755d3025"),
    "topk": ("de2b815b2dae", "237c4a1b6dc1"),
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_hashes_of_a_shipped_recipe_are_pinned(path: Path) -> None:
    recipe = load_recipe(path)
    assert (recipe.signal.hash[:12], recipe.train.hash[:12]) == HASHES[path.stem]


class _Released(Table):
    kept: int = 1


class _Extended(Table):
    later = frozenset({"added"})

    kept: int = 1
    added: bool = False


def test_a_later_key_enters_content_and_hash_only_off_its_default() -> None:
    assert _Extended().content == _Released().content == {"kept": 1}
    assert _Extended().hash == _Released().hash
    assert _Extended(added=True).content == {"kept": 1, "added": True}
    assert _Extended(added=True).hash != _Released().hash
    assert _Extended.model_validate(_Released().content) == _Extended()


def test_each_part_has_its_own_hash() -> None:
    plain = read_recipe(BINARY)
    trained = read_recipe(BINARY + "verdict_weight = 0.5\n")
    assert trained.signal.hash == plain.signal.hash
    assert trained.train.hash != plain.train.hash
    judged = read_recipe(BINARY.replace("hints = false", "hints = false\nm = 5"))
    assert judged.signal.hash != plain.signal.hash
    assert judged.train.hash == plain.train.hash
    renamed = read_recipe(BINARY.replace('"x"', '"y"'))
    assert (renamed.signal.hash, renamed.train.hash) == (plain.signal.hash, plain.train.hash)
    assert renamed.hash != plain.hash


@pytest.mark.parametrize(
    ("text", "field", "near"),
    [
        ("[train.loss]\nclip_hihg = 0.3", "train.loss.clip_hihg", "train.loss.clip_high"),
        ("[train]\nlr = 1e-4", "train.lr", "train.optimiser.lr"),
        ("[singal]\nm = 3", "singal", "signal"),
        ("[signal.overlong]\nlimit_token = 3", "signal.overlong.limit_token", "signal.overlong.limit_tokens"),
        ('[signal]\nvotes = "drect"', "signal.votes", "direct"),
        ('[train.advantage]\nteacher = "polisy"', "train.advantage.teacher", "policy"),
        ("[train.loss]\nKL = 0.1", "train.loss.KL", "train.loss.kl"),
        ("[train.bounds]\nKL = 0.1", "train.bounds.KL", "train.bounds.kl"),
        ('[signal]\nvotes = "DIRECT"', "signal.votes", "direct"),
        ("[train.optimiser]\nlearning_rate = 1e-4", "train.optimiser.learning_rate", "train.optimiser.lr"),
        ("[train]\nlearning_rate = 1e-4", "train.learning_rate", "train.optimiser.lr"),
        ("[train.lora]\nr = 8", "train.lora.r", "train.lora.rank"),
        ("[train]\nwhatever = 1", "train.whatever", None),
    ],
)
def test_an_unknown_key_or_value_is_refused_with_the_nearest_valid_one(text: str, field: str, near: str | None) -> None:
    with pytest.raises(RecipeRejected) as caught:
        read_recipe(f'name = "x"\n{text}')
    assert (caught.value.field, caught.value.near) == (field, near)
    assert field in str(caught.value)
    if near:
        assert f"did you mean '{near}'" in str(caught.value)
    else:
        assert "the keys here are batch_samples, max_wait_hours, staleness_versions" in str(caught.value)


@pytest.mark.parametrize("text", [f"{'k' * 1000} = 1", f'[signal]\nvotes = "{"d" * 1000}"'])
def test_only_the_start_of_a_long_key_is_compared(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def compare(word: str, *_: object, **__: object) -> list[str]:
        compared.append(word)
        return []

    monkeypatch.setattr(table, "get_close_matches", compare)
    with pytest.raises(RecipeRejected):
        read_recipe(f'name = "x"\n{text}')
    assert {len(word) for word in compared} == {100}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[signal]\nm = 0", "signal.m"),
        ('[signal]\nm = "3"', "signal.m"),
        ("[signal]\nm = true", "signal.m"),
        ("[signal]\nhints_needed = 0", "signal.hints_needed"),
        ("[train.advantage]\nspare_unlikely = 1.5", "train.advantage.spare_unlikely"),
        ("[train.loss]\nkl = nan", "train.loss.kl"),
        ("[train.loss]\nkl = -0.1", "train.loss.kl"),
        ("[train.loss]\nclip_low = 1.0", "train.loss.clip_low"),
        ("[train.optimiser]\nlr = inf", "train.optimiser.lr"),
        ("[train]\nbatch_samples = 0", "train.batch_samples"),
        ("[train]\nbatch_samples = 10001", "train.batch_samples"),
        ("[train]\nmax_wait_hours = 1e9", "train.max_wait_hours"),
        ("train = 3", "train"),
        ("[gate]\ntoken_share = 1.5", "gate.token_share"),
        ("[gate]\nlr_backoff = 0.0", "gate.lr_backoff"),
        ("[gate]\npause_after = 0", "gate.pause_after"),
        ("[gate]\nheld_out = 0.9", "gate.held_out"),
    ],
)
def test_a_value_out_of_range_or_of_another_type_is_refused(text: str, field: str) -> None:
    with pytest.raises(RecipeRejected) as caught:
        read_recipe(f'name = "x"\n{text}')
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[signal]\nverdicts = false\nhints = false", "signal"),
        ("[signal]\nhints = false", "train.advantage.teacher_weight"),
        ("[train.loss]\nkl = 0.0\n[gate]\nbase_distance = 2.0", "gate.base_distance"),
        ("[gate]\nparent_distance = 5.0", "gate.parent_distance"),
        ("[gate]\nreplay_turns = 100", "gate.replay_turns"),
        ("[signal]\nverdicts = false", "train.advantage.verdict_weight"),
        ("[train.advantage]\nverdict_weight = 0.0", "signal.verdicts"),
        ("[train.advantage]\nteacher_weight = 0.0", "signal.hints"),
        (f"{BINARY}\n[train.loss]\ndistillation = 1.0", "train.loss.distillation"),
        ("[train.loss]\npolicy_gradient = 0.0\ndistillation = 1.0", "train.loss.policy_gradient"),
        (
            "[signal]\nverdicts = false\nat_least_one = false\n[train.advantage]\nverdict_weight = 0.0\n"
            "teacher_weight = 0.0\n[train.loss]\ndistillation = 1.0",
            "train.loss.policy_gradient",
        ),
        (f'{BINARY}teacher = "base"', "train.advantage.teacher"),
        (f"{BINARY}opd_clip = 5.0", "train.advantage.opd_clip"),
        ("[train.distillation]\ntop_k = 20", "train.distillation"),
        (TOP_K.replace("[train.loss]", "spare_unlikely = 0.5\n[train.loss]"), "train.advantage.spare_unlikely"),
        ("[signal]\nverdicts = false\n[train.advantage]\nverdict_weight = 0.0", "signal.at_least_one"),
        (
            '[signal]\nverdicts = false\nat_least_one = false\nreward = "group"\n'
            "[train.advantage]\nverdict_weight = 0.0",
            "signal.reward",
        ),
        ('[signal]\nreward = "group"', "signal.hints"),
        ('[signal]\nreward = "outcome_process"', "signal.hints"),
        ('[signal]\nreward = "outcome_process"\nbaseline = "mean"', "signal.baseline"),
        (
            '[signal]\nverdicts = false\nat_least_one = false\nvotes = "direct"\n'
            "[train.advantage]\nverdict_weight = 0.0",
            "signal.votes",
        ),
        (BINARY.replace("[signal]", '[signal]\nvotes = "direct"\nm = 5'), "signal.m"),
        (BINARY.replace("[signal]", "[signal]\nhints_needed = 2"), "signal.hints_needed"),
        (BINARY.replace("[signal]", '[signal]\nvotes = "direct"\njudge_form = "free"'), "signal.judge_form"),
        (BINARY.replace("[signal]", '[signal]\nhints_from = "any"'), "signal.hints_from"),
        ("[signal]\nm = 3\nhints_needed = 4", "signal.hints_needed"),
        ('[train.distillation]\ndivergence = "forward"', "train.distillation"),
        ("[signal]\nprocess_weight = 0.5", "signal.process_weight"),
        ('[signal]\nreward = "group"\nbaseline = "mean"', "signal.baseline"),
        (
            '[signal]\nverdicts = false\nat_least_one = false\nbaseline = "mean"\n'
            "[train.advantage]\nverdict_weight = 0.0",
            "signal.baseline",
        ),
        (
            "[signal]\nverdicts = false\nat_least_one = false\n"
            "overlong = {limit_tokens = 9, cache_tokens = 3}\n[train.advantage]\nverdict_weight = 0.0",
            "signal.overlong",
        ),
        ("[signal.overlong]\nlimit_tokens = 10\ncache_tokens = 11", "signal.overlong.cache_tokens"),
        (
            "[signal]\nverdicts = true\n[train.advantage]\nverdict_weight = 0.0\nteacher_weight = 0.0\n"
            "[train.loss]\npolicy_gradient = 0.0",
            "signal.verdicts",
        ),
        ("[train.loss]\ndual_clip = 1.28", "train.loss.dual_clip"),
        ("[train.lora]\ndropout = 0.1", "train.lora.dropout"),
        ("[train]\ntrain_thinking = false", "train.train_thinking"),
        (f"{TOP_K}clip_low = 0.1", "train.loss.clip_low"),
        (f"{TOP_K}clip_high = 0.4", "train.loss.clip_high"),
        (f"{TOP_K}dual_clip = 5.0", "train.loss.dual_clip"),
        (f'{TOP_K}correction = "decoupled"\n[train.optimiser]\nepochs = 2', "train.loss.correction"),
        ("[train.loss]\nkl = 0.0\n[train.bounds]\nkl = 3.0", "train.bounds.kl"),
        (BINARY.replace("[signal]", '[signal]\nvotes = "direct"\njudge_temperature = 0.2'), "signal.judge_temperature"),
    ],
)
def test_contradicting_keys_are_refused_with_the_key_to_change(text: str, field: str) -> None:
    named = text if "name" in text else f'name = "x"\n{text}'
    with pytest.raises(RecipeRejected) as caught:
        read_recipe(named)
    assert caught.value.field == field


def test_dropout_is_refused_with_the_remedy() -> None:
    with pytest.raises(RecipeRejected, match=r"train\.lora\.dropout: .* set it to 0"):
        read_recipe('name = "x"\n[train.lora]\ndropout = 0.05')
    assert read_recipe('name = "x"\n[train.lora]\ndropout = 0.0').train.lora.dropout == 0


def test_several_epochs_can_use_the_decoupled_correction() -> None:
    text = 'name = "x"\n[train.loss]\ncorrection = "decoupled"\n[train.optimiser]\nepochs = 2'
    assert read_recipe(text).train.loss.correction == "decoupled"


def test_a_file_that_is_not_toml_is_refused_and_one_of_another_name_taken(tmp_path: Path) -> None:
    with pytest.raises(RecipeRejected, match="not TOML"):
        read_recipe("name = ")
    with pytest.raises(RecipeRejected, match="field required") as caught:
        read_recipe("")
    assert caught.value.field == "name"
    path = tmp_path / "mine.toml"
    path.write_text('name = "yours"')
    assert load_recipe(path).name == "yours"
    path.write_bytes(b'name = "mine"  # \xff')
    with pytest.raises(RecipeRejected, match=r"mine\.toml cannot be read"):
        load_recipe(path)


def test_all_problems_of_a_file_are_named_at_once() -> None:
    with pytest.raises(RecipeRejected) as wrong:
        parse_recipe({"name": "x", "signal": {"vote": 3}, "train": {"lr": "fast", "batch_samples": 0}})
    assert [line.partition(":")[0] for line in wrong.value.lines] == [
        "signal.vote",
        "train.lr",
        "train.batch_samples",
    ]
    assert wrong.value.field == "signal.vote"
    assert all(line in str(wrong.value) for line in wrong.value.lines)
    with pytest.raises(RecipeRejected) as contradictory:
        parse_recipe({"name": "x" * 251, "signal": {"hints": False}})
    assert len(contradictory.value.lines) >= 2


def test_a_name_too_long_for_a_file_is_refused_unless_stored() -> None:
    longest = {"name": "x" * 250}
    assert parse_recipe(longest).name == longest["name"]
    longer = {"name": "x" * 251}
    with pytest.raises(RecipeRejected, match=r"name: 251 characters, but 250 at most") as caught:
        parse_recipe(longer)
    assert caught.value.field == "name"
    assert parse_stored_recipe(longer).name == longer["name"]


def test_a_recipe_cannot_be_changed() -> None:
    recipe = Recipe(name="x")
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.loss.kl = 1.0


def test_reading_a_recipe_loads_no_torch() -> None:
    code = "import sys, clawloop.core.recipes.recipe; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("text", [f"{TOP_K}clip_low = 0.1", "[train.loss]\nkl = 0.0\n[train.bounds]\nkl = 3.0"])
def test_a_stored_recipe_with_a_key_without_effect_is_accepted(text: str) -> None:
    content = tomllib.loads(text if "name" in text else f'name = "x"\n{text}')
    with pytest.raises(RecipeRejected):
        parse_recipe(content)
    assert parse_stored_recipe(content).name == content["name"]
    content["train"]["train_thinking"] = False
    with pytest.raises(RecipeRejected, match="false is not supported: thinking tokens"):
        parse_stored_recipe(content)
