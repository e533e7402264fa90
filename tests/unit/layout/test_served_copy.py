"""A quantised copy that engines serve: planned in its own bytes, and refused where it is no copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from clawloop.app.layout.memory import PartName
from clawloop.app.local.machine import Device
from clawloop.app.local.model_layout import ModelOptions, lay_out, plan_models
from clawloop.app.local.services.vllm import read_model
from clawloop.core.errors import RecipeRejected, SetupError
from clawloop.core.recipes.recipe import Loss, Recipe, Train
from tests.unit.layout.folders import write_folder
from tests.unit.layout.test_quantised_weights import AWQ, write_quantised
from tests.verbs import clawloop, refusal

DECOUPLED = Recipe(name="decoupled", train=Train(loss=Loss(correction="decoupled")))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A model and its copy in AWQ."""
    return write_folder(tmp_path / "Tiny"), write_quantised(tmp_path / "Tiny-AWQ", AWQ)[0]


def options(copy: Path | None) -> ModelOptions:
    return ModelOptions(device=Device.CPU, dtype="bfloat16", memory=64 * 2**30, serve_model=copy)


def test_engines_hold_the_copy_and_the_trainer_the_model(folders: tuple[Path, Path]) -> None:
    model, copy = folders
    whole, engine_only = (lay_out(options(served), model, DECOUPLED, {}).processes for served in (None, copy))
    weights = [process.part(PartName.WEIGHTS) for process in (*whole[:2], *engine_only[:2])]
    assert weights[2] < weights[0]
    assert weights[3] == weights[1]
    # Everything but the weights is the model's.
    assert [part for part in whole[0].parts if part.name is not PartName.WEIGHTS] == [
        part for part in engine_only[0].parts if part.name is not PartName.WEIGHTS
    ]
    assert "--engines-quantised" in engine_only[1].arguments
    assert "--engines-quantised" not in whole[1].arguments


def test_up_starts_the_engine_on_the_copy_under_the_models_name(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, copy = folders
    planned = plan_models(read_model(model), options(copy), DECOUPLED, {}, 0, tmp_path)
    [engine] = planned.engines
    command = engine.prepare().command
    assert command[command.index("--model") + 1] == str(copy)
    assert command[command.index("--served-model-name") + 1] == planned.base_model == "Tiny"
    assert planned.trained_model == model


def edit(name: str, change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def edited(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edited


def other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}!")


def other_tokens(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 1}}}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edit("config.json", lambda config: config.update(vocab_size=99)), "no copy of Tiny: token ids 99, not 100"),
        (edit("config.json", lambda config: config.update(num_hidden_layers=3)), "layers 3, not 2"),
        (edit("config.json", lambda config: config.update(architectures=["OtherForCausalLM"])), "OtherForCausalLM"),
        (other_template, "its chat template is another"),
        (other_tokens, "gives tokens other ids"),
    ],
)
def test_what_is_no_copy_is_refused(change: Callable[[Path], None], said: str, folders: tuple[Path, Path]) -> None:
    model, copy = folders
    change(copy)
    with pytest.raises(SetupError, match=f"--serve-model: .*{said}"):
        lay_out(options(copy), model, DECOUPLED, {})


def test_a_copy_that_is_not_quantised_and_a_model_that_is_are_refused(folders: tuple[Path, Path]) -> None:
    model, copy = folders
    again = shutil.copytree(model, model.parent / "again")
    with pytest.raises(SetupError, match="again is not quantised"):
        lay_out(options(again), model, DECOUPLED, {})
    with pytest.raises(SetupError, match="served and not trained: give the unquantised model to --model"):
        lay_out(options(None), copy, DECOUPLED, {})


def test_a_recipe_that_is_not_decoupled_is_refused(folders: tuple[Path, Path]) -> None:
    model, copy = folders
    with pytest.raises(RecipeRejected, match=r"different weights.*set \"decoupled\""):
        lay_out(options(copy), model, Recipe(name="plain"), {})


def test_plan_takes_both_and_says_what_the_recipe_needs(folders: tuple[Path, Path]) -> None:
    model, copy = (str(folder) for folder in folders)
    said = clawloop("plan", "--model", model, "--serve-model", copy, "--quantise", "nf4", "--gpus", "80").stdout
    words = " ".join(said.split())
    assert "in awq and bfloat16" in words
    assert "in 4 bits and bfloat16" in words
    assert 'the recipe needs train.loss.correction = "decoupled"' in words
    assert "--quantise nf4" in words
    refused = refusal(clawloop("plan", "--model", model, "--quantise", "nf4", "--no-train"))
    assert "--quantise and --no-train contradict each other" in refused
