"""The formulas that recipe files open with agree with the recipes, and docs/learning.md explains their symbols."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawloop.core.recipes.recipe import Recipe, load_recipe
from tests.rules.tables import KEYS, RECIPES, ROOT, head

LEARNING = (ROOT / "docs" / "learning.md").read_text(encoding="utf-8")
SYMBOLS = LEARNING.split("## Symbols")[1].split("\n## ")[0]


def test_every_key_has_a_meaning_that_fits_a_table_and_names_its_choices() -> None:
    assert [key.name for key in KEYS if not key.meaning or "|" in key.meaning] == []
    unnamed = [(key.name, choice) for key in KEYS for choice in key.choices if f"`{choice}`" not in key.meaning]
    assert unnamed == []


def _formula(path: Path) -> str:
    """The indented lines of that comment, joined."""
    lines = [line for line in head(path).splitlines() if line.startswith("  ")]
    return " ".join(" ".join(lines).split()).replace(" · ", "·")


def test_every_symbol_of_a_formula_is_explained() -> None:
    explained = set(re.findall(r"`([^`]+)`", SYMBOLS))
    used = {symbol for path in RECIPES for symbol in re.findall(r"[A-Za-zΣπ]+_\w+|\b[AKLmOr]\b|[ρμλ]", _formula(path))}
    assert used
    assert used - explained == set()
    assert {"k2(base)", "clip(x, a, b)", "gap"} <= explained


def _times(weight: float) -> str:
    return "" if weight == 1 else f"{weight:g}·"


def _advantage(recipe: Recipe) -> str:
    advantage, reward = recipe.train.advantage, recipe.signal.reward
    of_verdict = _times(advantage.verdict_weight)
    if reward == "group":
        return f"A_i = {of_verdict}(r_i − mean r) / std r"
    if reward == "outcome_process":
        return f"A_t = {of_verdict}R_i"
    clip = f"clip(log π_T(a_t | s + hint) − log π_v(a_t | s), −{advantage.opd_clip:g}, {advantage.opd_clip:g})"
    terms = [f"{of_verdict}r"] if advantage.verdict_weight else []
    terms += [f"{_times(advantage.teacher_weight)}{clip}"] if advantage.teacher_weight else []
    return f"A_t = {' + '.join(terms)}"


def _distillation(recipe: Recipe) -> str:
    train = recipe.train
    one, other = ("p_T(k)", "p_S(k)") if train.distillation.divergence == "forward" else ("p_S(k)", "p_T(k)")
    whose = "the teacher's " if train.distillation.top_k_of == "teacher" else ""
    divergence = f"{_times(train.loss.distillation)}Σ_k {one}·(log {one} − log {other})"
    return f"{divergence} over {whose}K = {train.distillation.top_k} ids and the tail"


def _parts(recipe: Recipe) -> Iterator[str]:
    """The terms that a recipe's formula must contain, with the recipe's numbers."""
    advantage, loss, overlong = recipe.train.advantage, recipe.train.loss, recipe.signal.overlong
    if loss.policy_gradient:
        yield _advantage(recipe)
        bounds = f"{1 - loss.clip_low:g}, {1 + loss.clip_high:g}"
        gradient = f"min(ρA, clip(ρ, {bounds})·A), for A < 0 at most {loss.dual_clip:g}|A|"
        yield f"L = −{_times(loss.policy_gradient)}{gradient}"
        if loss.correction == "decoupled":
            yield ", times min(2, π_0/μ)"
            yield "ρ = π_θ/π_0, π_0 as the step began"
    if share := advantage.spare_unlikely:
        yield "A < 0 times μ" if share == 1 else f"A < 0 times {1 - share:g} + {share:g}·μ"
    if loss.distillation:
        yield _distillation(recipe)
    if loss.kl:
        # The tokens were drawn from μ, whatever else ρ is relative to.
        ratio = "π_θ/μ" if loss.correction == "decoupled" else "ρ"
        yield f"+ {loss.kl:g}·min({ratio}, 2)·k2(base)"
    if overlong is not None:
        flat = overlong.limit_tokens - overlong.cache_tokens
        yield f"penalty = 0 up to {flat} tokens, falling to −1 at {overlong.limit_tokens}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_opens_with_a_paragraph_and_a_formula_in_its_own_numbers(path: Path) -> None:
    recipe = load_recipe(path)
    assert len(head(path).split("\n\n", maxsplit=1)[0]) > 150
    # combined.toml has symbols for its weights, and their values beside them.
    weights = {"w_rl·": recipe.train.advantage.verdict_weight, "w_opd·": recipe.train.advantage.teacher_weight}
    rest = _formula(path)
    for name, weight in weights.items():
        rest = rest.replace(name, _times(weight))
    for part in _parts(recipe):
        assert part in rest
        rest = rest.replace(part, "", 1)
    # The remainder may contain words and the values of votes, but no other number or term.
    rest = re.sub(r"\{[−+01, ]+\}", "", rest)
    assert re.findall(r"[-−.\d]*\d|k2|clip|Σ_k|A_t", rest) == []
