"""The demo's ablation: each variant is a recipe, a run that was stopped goes on, and the table is the lines'."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import demo_ablation
from benchmarks.ablation_table import BEGIN, END, VARIANTS, Figures, interval, section, table, with_section
from benchmarks.demo_learning import append_line, changed, read_lines
from clawloop.demo.recipes import Method, demo_recipe
from clawloop.errors import SetupError
from clawloop.recipes.recipe import parse_recipe

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("variant", list(VARIANTS)[1:])
def test_each_variant_is_a_recipe_of_its_own_that_contradicts_nothing(variant: str) -> None:
    plain = demo_recipe(Method.COMBINED)
    varied = changed(plain, VARIANTS[variant])
    assert varied.hash != plain.hash
    assert parse_recipe(varied.model_dump()) == varied


def test_the_variants_change_what_the_table_is_about() -> None:
    changed_keys = {setting.partition("=")[0].rpartition(".")[2] for keys in VARIANTS.values() for setting in keys}
    asked = {"opd_clip", "teacher_weight", "kl", "baseline", "spare_unlikely", "divergence", "distillation"}
    assert asked <= changed_keys


def line(variant: str, seed: int, match: float, *, recipe: str = "", stopped: str | None = None) -> dict[str, Any]:
    """A user whose first version, at 40 of 100 interactions, has this match, and version 0 half of it."""
    rows = [{"interactions": 0, "match": match / 2}, {"interactions": 40, "match": match}]
    run = {"seed": seed, "exact_least": 1.0, "stopped": stopped, "evaluations": rows}
    return {"variant": variant, "recipe": recipe or variant, "interactions": 100, "run": run}


def test_a_users_match_is_that_of_the_version_that_answered() -> None:
    figures = Figures.of(line("kl 0", 1, 0.8)["run"], 100)
    assert figures.values() == pytest.approx((0.4 * 0.4 + 0.6 * 0.8, 0.6, 1.0))


def test_differences_are_paired_by_user() -> None:
    assert interval([0.1, 0.3]) == pytest.approx((0.2, 12.71 * 0.1))
    lines = [line("as it is", 1, 0.5), line("as it is", 2, 0.7), line("kl 0", 1, 0.6), line("kl 0", 2, 0.8)]
    first, second = table([*lines, line("kl 0", 3, 0.0, stopped="three rejected")]).splitlines()[2:]
    assert first.startswith("| as it is | 2 | 48.0% ± 101.7% | 45.0% ± 95.3% | 100.0% ± 0.0% | 0 |")
    # The third user met only this variant, and so counts in nothing.
    assert second == "| kl 0 | 2 | +8.0% ± 0.0% | +7.5% ± 0.0% | +0.0% ± 0.0% | 0 |"


def test_users_of_several_recipes_are_not_compared() -> None:
    lines = [line("as it is", 1, 0.5), line("as it is", 2, 0.5, recipe="with another learning rate")]
    with pytest.raises(SetupError, match="'as it is' was run with several recipes; give another --out"):
        table(lines)


def test_a_run_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "lines.jsonl"
    recipe = changed(demo_recipe(Method.COMBINED), VARIANTS["kl 0"]).hash
    append_line(out, line("kl 0", 1, 0.5, recipe=recipe))
    with out.open("a") as killed:
        killed.write('{"variant": "kl')
    ran = []

    def run_user(options: Any, of: Any, seed: int, method: Method) -> dict[str, Any]:
        ran.append((seed, of.train.loss.kl, options.set))
        found = line("kl 0", seed, 0.5, recipe=of.hash)
        printed: dict[str, Any] = {
            "method": method.value,
            "interactions_to_90": None,
            "match_held": None,
            "match_kept": None,
            "exact_least": 1.0,
            "flipped_at": None,
        }
        printed |= {"match_after": 0.5, "versions": 1, "rejected": 0, "seconds": 1.0}
        return found | {"run": found["run"] | printed}

    monkeypatch.setattr(demo_ablation, "run_user", run_user)
    words = ["demo_ablation", "--out", str(out), "--seeds", "1", "2", "--variants", "kl 0"]
    monkeypatch.setattr(sys, "argv", words)
    demo_ablation.main()
    demo_ablation.main()
    assert ran == [(2, 0.0, ["train.loss.kl=0"])]
    assert [one["run"]["seed"] for one in read_lines(out)] == [1, 2]
    assert len([json.loads(text) for text in out.read_text().splitlines()]) == 2
    monkeypatch.setattr(sys, "argv", [*words, "--interactions", "50"])
    with pytest.raises(SystemExit, match="different numbers of interactions"):
        demo_ablation.main()


def test_the_document_has_the_table_of_the_committed_lines() -> None:
    """`python -m benchmarks.demo_ablation --out docs/demo/ablation.jsonl --docs docs/learning.md` writes it."""
    document = (ROOT / "docs" / "learning.md").read_text(encoding="utf-8")
    lines = read_lines(ROOT / "docs" / "demo" / "ablation.jsonl")
    recipe = demo_recipe(Method.COMBINED).hash
    assert with_section(document, lines, recipe) == document
    written = with_section(f"before\n{BEGIN}\nold\n{END}\nafter\n", [line("as it is", 1, 0.5)], recipe)
    assert written.startswith(f"before\n{BEGIN}\nMeasured with 1 users (seeds 1 to 1), 100 interactions each")
    assert "recipe has changed since" in written
    assert written.endswith(f"| 0 |\n{END}\nafter\n")
    assert "changed since" not in section([line("as it is", 1, 0.5, recipe=recipe)], recipe)
    with pytest.raises(SetupError, match="needs a line"):
        with_section("nothing", lines, recipe)
