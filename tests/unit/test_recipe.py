"""Recipes: every shipped one loads; hashes are of content; what cannot be meant is refused by name."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.episodes.curriculum import ENOUGH, HIGH, LOW, Counted, KindState, Trial, draw, revise, success_of
from clawloop.core.episodes.kinds import KINDS, Levels
from clawloop.core.errors import RecipeRejected
from clawloop.core.recipes import table
from clawloop.core.recipes.recipe import (
    CONTROL,
    DEFAULT_RECIPE,
    Advantage,
    Distillation,
    Gate,
    HintChoice,
    Loss,
    Optimiser,
    Recipe,
    Schedule,
    Train,
    load_recipe,
    parse_recipe,
    parse_stored_recipe,
    read_recipe,
)
from clawloop.core.recipes.schedule import Closed, closed_by, day_begin
from clawloop.core.recipes.table import Table
from clawloop.environments.browser import kinds as browser
from clawloop.environments.swe.environment import FUNCTIONS_BY_NAME
from clawloop.environments.terminal.environment import KINDS_BY_NAME

# Recipes: every shipped one loads; hashes are of content; what cannot be meant is refused by name.

RECIPES = sorted((Path(__file__).parents[2] / "deploy" / "recipes").glob("*.toml"))
BINARY = """
name = "x"
[signal]
hints = false
[train.advantage]
teacher_weight = 0.0
"""
HINDSIGHT = """
name = "x"
[signal]
verdicts = false
at_least_one = false
hints_from = "message"
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


def test_the_combined_recipe_has_the_longest_hint_at_the_sampled_tokens() -> None:
    combined = next(load_recipe(path) for path in RECIPES if path.stem == "combined")
    spared = Train(
        advantage=Advantage(spare_unlikely=1.0), loss=Loss(kl=0.1), optimiser=Optimiser(beta1=0.5, grad_clip=0.05)
    )
    assert combined == Recipe(name="combined", train=spared, gate=Gate(held_out=0.1, lr_backoff=0.25))
    assert (combined.train.uses_rewards, combined.train.uses_hints) == (True, True)
    assert combined.train.places_read([2, 0, 1]) == (0,)


@pytest.mark.parametrize(
    ("choice", "places"),
    [("sequence_optimal", (0, 1, 2)), ("token_optimal", (0, 1, 2)), ("shortest", (2,)), ("longest", (0,))],
)
def test_a_reply_is_read_behind_the_hints_that_may_be_chosen(choice: HintChoice, places: tuple[int, ...]) -> None:
    distilled = DEFAULT_RECIPE.train.model_copy(update={"distillation": Distillation(hint_choice=choice)})
    assert distilled.places_read([2, 0, 1]) == places
    assert distilled.places_read([]) == ()
    assert distilled.documents_read([2, CONTROL, 0, 1]) == (*places, CONTROL)
    assert distilled.documents_read([2, 0, 1]) == places
    assert distilled.documents_read([CONTROL]) == ()
    alone = distilled.model_copy(update={"advantage": distilled.advantage.model_copy(update={"control": False})})
    assert alone.documents_read([2, CONTROL, 0, 1]) == places


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
    assert Recipe(name="combined").hash[:12] == "f0f2881fa68a"
    grpo = next(load_recipe(path) for path in RECIPES if path.stem == "grpo")  # the one with [signal.overlong]
    assert grpo.signal.hash[:12] == "457c057b86a4"


HASHES = {
    "binary": ("bd1fc7c9a35c", "f97cc2338437"),
    "combined": ("dfe1d7ba3ef8", "a6eda4471f81"),
    "demo": ("dfe1d7ba3ef8", "27bcb7feefcb"),
    "grpo": ("457c057b86a4", "f97cc2338437"),
    "hindsight": ("97e1e23ba58f", "02cfd564d226"),
    "hybrid": ("dfe1d7ba3ef8", "258a3832b068"),
    "judge": ("065925e6c6d8", "f97cc2338437"),
    "opd": ("de2b815b2dae", "86884003d01c"),
    "outcome_process": ("8b880a10a120", "f97cc2338437"),
    "quantised": ("dfe1d7ba3ef8", "129c8111c8c8"),
    "topk": ("de2b815b2dae", "c52358dcf203"),
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
        ("[lessons]\nenabled = true\nmax_tokens = 10", "lessons.max_tokens"),
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
        ("[lessons]\nmax_tokens = 100", "lessons.max_tokens"),
        ("[lessons]\nshared = true", "lessons.shared"),
        ("[lessons]\nfrom_corrections = true", "lessons.from_corrections"),
        ("[lessons]\npractice = true", "lessons.practice"),
        (f"{BINARY}[lessons]\nenabled = true\npractice = true", "lessons.practice"),
        ("[lessons]\nretire = true", "lessons.retire"),
        ("[lessons]\nenabled = true\nretire = true", "lessons.retire"),
        (f"{BINARY}[lessons]\nenabled = true\nfrom_corrections = true", "lessons.from_corrections"),
        (
            '[signal]\nhints_from = "any"\n[lessons]\nenabled = true\nfrom_corrections = true',
            "lessons.from_corrections",
        ),
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
        (f'{TOP_K}[train.distillation]\ntop_k_of = "overlap"', "train.distillation.top_k_of"),
        (TOP_K.replace("[train.loss]", 'teacher = "base"\n[train.loss]'), "train.advantage.teacher"),
        (TOP_K.replace("[train.loss]", "opd_clip = 1.0\n[train.loss]"), "train.advantage.opd_clip"),
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
        (HINDSIGHT.replace("[signal]", "[signal]\nm = 5"), "signal.m"),
        (HINDSIGHT.replace("[signal]", "[signal]\nhints_needed = 2"), "signal.hints_needed"),
        (HINDSIGHT.replace("[signal]", '[signal]\njudge_form = "free"'), "signal.judge_form"),
        (HINDSIGHT.replace("[signal]", "[signal]\njudge_temperature = 1.0"), "signal.judge_temperature"),
        (HINDSIGHT.replace("at_least_one = false", ""), "signal.at_least_one"),
        (BINARY.replace("[train.advantage]", "[train.advantage]\ncentre_gap = true"), "train.advantage.centre_gap"),
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
        (f"{TOP_K}[train.distillation]\nspare_end = true", "train.distillation.spare_end"),
        (f"{BINARY}\n[train.distillation]\nspare_end = true", "train.distillation.spare_end"),
        (
            "[train.advantage]\ncentre_gap = true\n[train.distillation]\nspare_end = true",
            "train.distillation.spare_end",
        ),
        (
            BINARY.replace("[signal]", '[signal]\nreward = "group"') + "\n[train]\ncorrected_share = 0.2",
            "train.corrected_share",
        ),
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


# When a recipe lets batches be claimed.

BERLIN = ZoneInfo("Europe/Berlin")
NIGHT = Schedule(hours="01:00-06:00", time_zone="Europe/Berlin")


def at(text: str, zone: ZoneInfo = BERLIN) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=zone).astimezone(UTC)


@pytest.mark.parametrize(
    ("hours", "now", "opens"),
    [
        ("01:00-06:00", "2026-11-23T00:59", "Mon 23 Nov 01:00"),
        ("01:00-06:00", "2026-11-23T01:00", None),
        ("01:00-06:00", "2026-11-23T05:59", None),
        ("01:00-06:00", "2026-11-23T06:00", "Tue 24 Nov 01:00"),
        ("22:00-06:00", "2026-11-23T03:00", None),
        ("22:00-06:00", "2026-11-23T21:00", "Mon 23 Nov 22:00"),
        ("22:00-24:00", "2026-11-23T23:59", None),
        ("12:00-13:30, 22:00-06:00", "2026-11-23T14:00", "Mon 23 Nov 22:00"),
        ("12:00-13:30,22:00-06:00", "2026-11-23T13:29", None),
        ("01:00-06:00", "2026-03-29T06:30", "Mon 30 Mar 01:00"),  # the day of the change to summer time
    ],
)
def test_hours(hours: str, now: str, opens: str | None) -> None:
    schedule = Schedule(hours=hours, time_zone="Europe/Berlin")
    closed = closed_by(schedule, at(now), 0, None)
    if opens is None:
        assert closed is None
    else:
        assert closed is not None
        assert closed.reason == f"outside of its hours {hours} (Europe/Berlin), until {opens}"


def test_the_seconds_until_it_opens_are_real_seconds() -> None:
    assert closed_by(NIGHT, at("2026-11-23T00:30"), 0, None) == Closed(
        "outside of its hours 01:00-06:00 (Europe/Berlin), until Mon 23 Nov 01:00", 1800.0
    )
    # The clock is put back in the night: an hour more.
    closed = closed_by(NIGHT, at("2026-10-24T06:00"), 0, None)
    assert closed is not None
    assert closed.seconds == 19 * 3600
    closed = closed_by(Schedule(hours="04:00-06:00", time_zone="Europe/Berlin"), at("2026-10-24T06:00"), 0, None)
    assert closed is not None
    assert closed.seconds == 23 * 3600


def test_versions_of_a_day() -> None:
    daily = Schedule(versions_a_day=2, time_zone="Europe/Berlin")
    now = at("2026-11-23T22:00")
    assert day_begin(daily, now) == at("2026-11-23T00:00")
    assert closed_by(daily, now, 1, None) is None
    assert closed_by(daily, now, 2, None) == Closed(
        "2 versions were made today (Europe/Berlin), 2 at most, until Tue 24 Nov 00:00", 7200.0
    )


def test_slow_chats() -> None:
    quick = Schedule(chat_seconds=2)
    now = at("2026-11-23T22:00")
    assert closed_by(quick, now, 0, None) is None
    assert closed_by(quick, now, 0, 2.0) is None
    assert closed_by(quick, now, 0, 4.25) == Closed("replies take 4.2 s (p95 of 5 minutes), 2 s at most", 60.0)


@pytest.mark.parametrize(
    ("keys", "field", "problem"),
    [
        ('hours = "1 to 6 am"', "hours", "'1 to 6 am' is no window: write 01:00-06:00"),
        ('hours = "01:00-25:00"', "hours", "is no window"),
        ('hours = "01:60-02:00"', "hours", "is no window"),
        ('hours = "24:00-02:00"', "hours", "is no window"),
        ('hours = "06:00-06:00"', "hours", "no batch would ever be claimed"),
        ('hours = "01:00-06:00, 05:00-07:00"', "hours", "overlap: join them"),
        ('hours = "22:00-06:00, 05:00-07:00"', "hours", "overlap: join them"),
        ('hours = "00:00-24:00"', "hours", "is the whole day, which has no effect"),
        ('hours = "00:00-12:00, 12:00-24:00"', "hours", "is the whole day"),
        ('hours = "01:00-06:00"\ntime_zone = "Berlin"', "time_zone", "'Berlin' is no time zone"),
        ('hours = "01:00-06:00"\ntime_zone = "../etc/passwd"', "time_zone", "is no time zone"),
        ('hours = "01:00-06:00"\ntime_zone = ""', "time_zone", "is no time zone"),
        ('time_zone = "Europe/Berlin"\nchat_seconds = 2.0', "time_zone", "has no effect without"),
        ("versions_a_day = -1", "versions_a_day", "greater than or equal to 0"),
    ],
)
def test_what_contradicts_itself_is_refused(keys: str, field: str, problem: str) -> None:
    with pytest.raises(RecipeRejected, match=problem) as raised:
        read_recipe(f'name = "x"\n[train.schedule]\n{keys}')
    assert raised.value.field == f"train.schedule.{field}"


def test_an_empty_schedule_is_refused() -> None:
    with pytest.raises(RecipeRejected, match="has no effect: set hours") as raised:
        read_recipe('name = "x"\n[train.schedule]')
    assert raised.value.field == "train.schedule"


# The rule of curricula: what it does with counts, and how it follows a policy that learns.

LEVELS = Levels(first=2, hardest=4)
SIZE = 8


def _groups(success: float, episodes: int = ENOUGH) -> list[Counted]:
    return [Counted(SIZE, round(SIZE * success))] * (episodes // SIZE)


_COUNTS = st.lists(st.integers(0, SIZE).map(lambda n: Counted(SIZE, n)), max_size=12)
_TRIALS = st.none() | st.builds(Trial, st.integers(1, 4), st.floats(0, 1))
_STATES = st.builds(
    KindState,
    st.just("times"),
    st.integers(1, 4),
    st.sampled_from([1.0, 0.5, 0.25, 0.125]),
    st.sampled_from([ENOUGH, 2 * ENOUGH, 8 * ENOUGH]),
    _TRIALS,
)


@given(_STATES, _COUNTS)
def test_a_kind_stays_within_bounds_and_moves_by_one_level(state: KindState, groups: list[Counted]) -> None:
    after, why = revise(state, LEVELS, groups)
    assert (after, why) == revise(state, LEVELS, groups)
    assert (after == state) == (why == "")
    assert after == state or sum(group.scored for group in groups) >= state.needed
    assert 1 <= after.level <= LEVELS.hardest
    assert 0.125 <= after.weight <= 1
    assert ENOUGH <= after.patience <= 8 * ENOUGH
    if state.trial is None:
        success = success_of(groups)
        assert abs(after.level - state.level) <= 1
        assert after.level <= state.level or (success is not None and success > HIGH)
        assert after.level >= state.level or (success is not None and success < LOW)
    else:
        assert after.level in (state.level, state.trial.level)


@pytest.mark.parametrize(
    ("success", "before", "words"),
    [
        (0.875, 3, "level 3 instead of 2, on trial"),
        (0.125, 1, "level 1 instead of 2, on trial"),
        (0.75, 2, ""),
        (0.25, 2, ""),
    ],
)
def test_a_level_moves_where_success_leaves_the_range(success: float, before: int, words: str) -> None:
    after, why = revise(KindState("times", 2), LEVELS, _groups(success))
    assert after.level == before
    assert why.endswith(words)
    assert (after.trial is None) == (words == "")
    assert revise(KindState("times", 2), LEVELS, _groups(success)[1:]) == (KindState("times", 2), "")


@pytest.mark.parametrize(
    ("level", "was", "before", "after", "kept", "words"),
    [
        (3, 2, 0.9, 0.5, True, "kept"),
        (3, 2, 0.9, 1.0, False, "undone, not as meant"),
        (3, 2, 0.9, 0.125, False, "undone, too hard"),
        (1, 2, 0.1, 0.5, True, "kept"),
        (1, 2, 0.1, 1.0, True, "kept"),
        (1, 2, 0.125, 0.125, False, "undone, not as meant"),
    ],
)
def test_a_change_is_kept_only_if_success_moved_as_meant(
    level: int, was: int, before: float, after: float, kept: bool, words: str
) -> None:
    on_trial = KindState("times", level, trial=Trial(was, before))
    assert revise(on_trial, LEVELS, _groups(after)[1:]) == (on_trial, "")
    decided, why = revise(on_trial, LEVELS, _groups(after))
    assert why.endswith(words)
    assert decided == (KindState("times", level) if kept else KindState("times", was, 0.5, 2 * ENOUGH))


def test_where_no_level_is_left_a_kind_is_drawn_less_and_more_again_once_it_teaches() -> None:
    state = KindState("times", LEVELS.hardest)
    weights = []
    for _ in range(5):
        state, _ = revise(state, LEVELS, _groups(1.0))
        weights.append(state.weight)
    assert weights == [0.5, 0.25, 0.125, 0.125, 0.125]
    assert revise(state, LEVELS, _groups(0.5))[0] == KindState("times", LEVELS.hardest)


def test_only_the_newest_groups_count() -> None:
    assert success_of(_groups(0.5) + _groups(1.0)) == 0.5
    assert success_of([]) is None


def test_kinds_are_drawn_as_often_as_their_weights_say_and_evenly() -> None:
    states = [KindState("a", 1), KindState("b", 1, 0.5), KindState("c", 1, 0.5)]
    drawn = [draw(states, number).kind for number in range(400)]
    assert drawn == [draw(states, number).kind for number in range(400)]
    for start in range(0, 400, 40):
        counts = Counter(drawn[start : start + 40])
        assert abs(counts["a"] - 20) <= 3
        assert abs(counts["b"] - 10) <= 3


def _simulate(success: Callable[[int, int], float], groups: int, seed: int) -> list[KindState]:
    """The states after each group; `success` of the group's number and level."""
    drawn = random.Random(seed)
    state, counted, states = KindState("times", 1), list[Counted](), list[KindState]()
    for number in range(groups):
        probability = success(number, state.level)
        counted.insert(0, Counted(SIZE, sum(drawn.random() < probability for _ in range(SIZE))))
        after, why = revise(state, Levels(1, 6), counted)
        if why:
            counted.clear()
        state = after
        states.append(state)
    return states


def test_the_level_follows_a_policy_that_learns() -> None:
    """Its skill grows from 1 to 6 in 400 groups; at a level of its skill it succeeds half of the time."""

    def success(number: int, level: int) -> float:
        return 1 / (1 + math.exp(2 * (level - 1 - 5 * number / 400)))

    for seed in (1, 2, 3):
        states = _simulate(success, 400, seed)
        assert states == _simulate(success, 400, seed)
        levels = [state.level for state in states]
        assert levels[0] == 1
        assert levels[-1] >= 4
        told_apart = sum(0.1 < success(number, level) < 0.9 for number, level in enumerate(levels))
        stays_easy = sum(0.1 < success(number, 1) < 0.9 for number in range(400))
        assert told_apart > 0.8 * 400 > 2 * stays_easy


def test_a_level_that_changes_nothing_is_tried_ever_less_often_and_never_kept() -> None:
    states = _simulate(lambda _number, _level: 1.0, 400, 1)
    assert {state.level for state in states} == {1, 2}
    assert {state.level for state in states if state.trial is None} == {1}
    trials = [i for i in range(1, 400) if states[i].trial is not None and states[i - 1].trial is None]
    # A trial takes 4 groups, and is due after 8, 16 and then 32 further ones.
    assert [later - earlier for earlier, later in pairwise(trials)][:4] == [12, 20, 36, 36]
    assert states[-1].weight == 0.125


def test_the_kinds_are_those_of_the_environments() -> None:
    assert set(KINDS["terminal"]) == set(KINDS_BY_NAME)
    assert set(KINDS["swe"]) == set(FUNCTIONS_BY_NAME)
    assert set(KINDS["browser"]) == set(browser.KINDS_BY_NAME)
    assert set(KINDS["browser"].values()) == {Levels(browser.FIRST_LEVEL, browser.HARDEST_LEVEL)}
