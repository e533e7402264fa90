"""`clawloop training`, `policy` and `recipe` on real PostgreSQL, without Temporal."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import ValidationError

from clawloop.app.processes.bootstrap import DEFAULT_RECIPE, create_default_policy, prepare
from clawloop.core.errors import RecipeRejected, SetupError
from clawloop.core.recipes.recipe import Recipe, load_recipe
from clawloop.core.settings import Settings
from tests.conftest import execute
from tests.verbs import clawloop, clawloop_process, refusal

QUANTISED = Path(__file__).parents[2] / "deploy" / "recipes" / "quantised.toml"


@pytest.fixture
def here(postgres_url: str, tmp_path: Path) -> dict[str, str]:
    asyncio.run(create_default_policy(postgres_url, "tiny", [], []))
    # Nothing listens there: PostgreSQL is changed nevertheless.
    return {"DATABASE_URL": postgres_url, "CLAWLOOP_DATA": str(tmp_path), "TEMPORAL_ADDRESS": "127.0.0.1:1"}


def output_of(*arguments: str, here: dict[str, str]) -> Any:
    done = clawloop(*arguments, "--json", **here)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_pause_and_resume_without_temporal(here: dict[str, str]) -> None:
    status = output_of("training", "status", here=here)
    assert (status["state"], status["ready"], status["needed"], status["version"]) == ("waiting", 0, 16, 0)
    paused = clawloop_process("training", "pause", "the machine is needed", **here)
    assert paused.returncode == 0
    assert "paused: the machine is needed" in paused.stdout
    assert "The change holds; the training workflow sees it when it reads the ledger next" in paused.stderr
    assert output_of("training", "status", here=here)["state"] == "paused"
    assert output_of("training", "resume", here=here)["state"] == "waiting"
    assert "no policy 'nobody'" in refusal(clawloop("training", "status", "--policy", "nobody", **here))
    assert clawloop("training", "pause", " ", **here).returncode == 2


def test_versions_are_listed_rolled_back_and_pinned(here: dict[str, str]) -> None:
    with psycopg.connect(here["DATABASE_URL"]) as connection:
        for n in (1, 2):
            connection.execute(
                "INSERT INTO versions (policy, n, parent, path, sha256) VALUES ('default', %s, %s, %s, %s)",
                (n, n - 1, f"default/v{n}-0123456789ab", b"\1" * 32),
            )
        connection.execute("UPDATE policies SET head = 2")
    listed = json.loads(clawloop_process("policy", "versions", "--json", **here).stdout)
    assert [(row["n"], row["state"]) for row in listed["versions"]] == [
        (0, "active, on the path"),
        (1, "on the path"),
        (2, "head"),
    ]
    pinned = output_of("policy", "pin", "1", here=here)
    assert (pinned["version"], pinned["pinned"]) == (0, 1)  # no engine has it yet
    assert "unpin first" in refusal(clawloop("policy", "roll-back", "0", **here))
    assert output_of("policy", "pin", "--none", here=here)["version"] == 0
    assert output_of("policy", "roll-back", "1", here=here)["head"] == 1
    assert "clawloop policy versions default" in refusal(clawloop("policy", "roll-back", "7", **here))
    assert clawloop("policy", "pin", **here).returncode == 2
    (policy,) = output_of("policy", "list", here=here)["policies"]
    assert (policy["policy"], policy["base_model"], policy["training"]["head"]) == ("default", "tiny", 1)


def test_a_shown_recipe_can_be_edited_and_set(here: dict[str, str], tmp_path: Path) -> None:
    shown = clawloop_process("recipe", "show", **here).stdout
    file = tmp_path / "combined.toml"
    file.write_text(shown)
    assert load_recipe(file) == DEFAULT_RECIPE
    file.write_text(shown.replace("train.batch_samples = 16", "train.batch_samples = 4"))
    done = clawloop_process("recipe", "set", str(file), **here)
    assert done.returncode == 0
    assert "The change holds; the training workflow sees it when it reads the ledger next" in done.stderr
    assert output_of("recipe", "show", here=here)["train"]["batch_samples"] == 4
    assert output_of("training", "status", here=here)["needed"] == 4
    file.write_text("name = 'combined'\ntrain.batch_sample = 4\n")
    assert "batch_samples" in refusal(clawloop("recipe", "set", str(file), **here))
    assert "no policy 'nobody'" in refusal(clawloop("recipe", "show", "--policy", "nobody", **here))


def test_a_rank_above_the_engines_limit_is_rejected(here: dict[str, str], tmp_path: Path) -> None:
    large = Recipe.model_validate({"name": "large", "train": {"lora": {"rank": 32}}})
    file = tmp_path / "large.toml"
    file.write_text("name = 'large'\ntrain.lora.rank = 32\n")
    line = refusal(clawloop("recipe", "set", str(file), **here))
    assert "train.lora.rank: 32, but engines take 16 at most" in line
    assert "CLAWLOOP_MAX_LORA_RANK" in line
    with pytest.raises(ValidationError, match="engines take one of 1, 8, 16, 32"):
        Settings(max_lora_rank=17)
    url = here["DATABASE_URL"]
    with pytest.raises(RecipeRejected, match="engines take 16"):
        asyncio.run(prepare(url, "tiny", [], [], {}, recipe=large))
    assert output_of("recipe", "show", here=here)["name"] == "combined"
    wide = here | {"CLAWLOOP_MAX_LORA_RANK": "32"}
    assert clawloop("recipe", "set", str(file), **wide).returncode == 0
    # A later start with the default limit could not load adapters of that recipe.
    with pytest.raises(RecipeRejected, match="engines take 16"):
        asyncio.run(prepare(url, "tiny", [], [], {}))
    asyncio.run(prepare(url, "tiny", [], [], {}, max_lora_rank=32))


def test_with_quantised_weights_a_start_needs_a_decoupled_recipe(postgres_url: str) -> None:
    asyncio.run(prepare(postgres_url, "tiny", [], [], {}))
    with pytest.raises(RecipeRejected, match=r"set \"decoupled\" in a recipe and start once with --recipe FILE"):
        asyncio.run(prepare(postgres_url, "tiny", [], [], {}, quantised=True))
    decoupled = load_recipe(QUANTISED)
    asyncio.run(prepare(postgres_url, "tiny", [], [], {}, recipe=decoupled, quantised=True))
    # The stored recipe is enough from then on.
    asyncio.run(prepare(postgres_url, "tiny", [], [], {}, quantised=True))


def test_an_invalid_stored_recipe_is_reported_with_a_remedy(here: dict[str, str]) -> None:
    url = here["DATABASE_URL"]
    older = "UPDATE recipes SET content = jsonb_set(content::jsonb, '{train,train_thinking}', 'false')::json"
    execute(url, older)
    line = refusal(clawloop("recipe", "show", **here))
    assert line.startswith("clawloop: Policy 'default': its recipe cannot be used any more: train.train_thinking")
    assert "set another with `clawloop recipe set`" in line
    with pytest.raises(SetupError, match=r"recipe of policy 'default' .*train\.train_thinking.*--recipe FILE"):
        asyncio.run(prepare(url, "tiny", [], [], {}))
    asyncio.run(prepare(url, "tiny", [], [], {}, recipe=Recipe(name="other")))
    asyncio.run(prepare(url, "tiny", [], [], {}))
