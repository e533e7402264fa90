"""`clawloop training`, `policy` and `recipe` as operators run them, on real PostgreSQL; Temporal is away."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import ValidationError

from clawloop.errors import RecipeRejected, SetupError
from clawloop.processes.bootstrap import create_default_policy, prepare
from clawloop.recipes.recipe import Recipe, load_recipe
from clawloop.settings import Settings
from tests.conftest import execute
from tests.verbs import clawloop, clawloop_process, refusal

pytestmark = [pytest.mark.postgres, pytest.mark.slow]


@pytest.fixture
def here(postgres_url: str, tmp_path: Path) -> dict[str, str]:
    asyncio.run(create_default_policy(postgres_url, "tiny", [], []))
    # Nothing listens there: what operators say holds nevertheless.
    return {"DATABASE_URL": postgres_url, "CLAWLOOP_DATA": str(tmp_path), "TEMPORAL_ADDRESS": "127.0.0.1:1"}


def said(*words: str, here: dict[str, str]) -> Any:
    done = clawloop(*words, "--json", **here)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_pause_holds_although_temporal_is_away(here: dict[str, str]) -> None:
    status = said("training", "status", here=here)
    assert (status["state"], status["samples"], status["version"]) == ("waiting", "0 of 16", "0")
    paused = clawloop_process("training", "pause", "the machine is needed", **here)
    assert paused.returncode == 0
    assert "paused: the machine is needed" in paused.stdout
    assert "The change holds; the training workflow sees it when it reads the ledger next" in paused.stderr
    assert said("training", "status", here=here)["state"] == "paused"
    assert said("training", "resume", here=here)["state"] == "waiting"
    assert "no policy 'nobody'" in refusal(clawloop("training", "status", "--policy", "nobody", **here))
    assert clawloop("training", "pause", " ", **here).returncode == 2


def test_versions_are_listed_rolled_back_to_and_pinned(here: dict[str, str]) -> None:
    with psycopg.connect(here["DATABASE_URL"]) as connection:
        for n in (1, 2):
            connection.execute(
                "INSERT INTO versions (policy, n, parent, path, sha256) VALUES ('default', %s, %s, %s, %s)",
                (n, n - 1, f"default/v{n}-0123456789ab", b"\1" * 32),
            )
        connection.execute("UPDATE policies SET head = 2")
    listed = json.loads(clawloop_process("policy", "versions", "--json", **here).stdout)
    assert [(row["version"], row["state"]) for row in listed] == [
        ("0", "active, on the path"),
        ("1", "on the path"),
        ("2", "head"),
    ]
    assert said("policy", "pin", "1", here=here)["version"] == "0 (pinned)"  # no engine has it yet
    assert "unpin first" in refusal(clawloop("policy", "roll-back", "0", **here))
    assert said("policy", "pin", "--none", here=here)["version"] == "0"
    assert said("policy", "roll-back", "1", here=here)["head"] == "1"
    assert "clawloop policy versions default" in refusal(clawloop("policy", "roll-back", "7", **here))
    assert clawloop("policy", "pin", **here).returncode == 2
    (policy,) = said("policy", "list", here=here)
    assert (policy["policy"], policy["base model"], policy["head"]) == ("default", "tiny", "1")


def test_a_recipe_that_is_shown_can_be_changed_and_set(here: dict[str, str], tmp_path: Path) -> None:
    shown = clawloop_process("recipe", "show", **here).stdout
    file = tmp_path / "combined.toml"
    file.write_text(shown)
    assert load_recipe(file) == Recipe(name="combined")
    file.write_text(shown.replace("train.batch_samples = 16", "train.batch_samples = 4"))
    done = clawloop_process("recipe", "set", str(file), **here)
    assert done.returncode == 0
    assert "The change holds; the training workflow sees it when it reads the ledger next" in done.stderr
    assert said("recipe", "show", here=here)["train"]["batch_samples"] == 4
    assert said("training", "status", here=here)["samples"] == "0 of 4"
    file.write_text("name = 'combined'\ntrain.batch_sample = 4\n")
    assert "batch_samples" in refusal(clawloop("recipe", "set", str(file), **here))
    assert "no policy 'nobody'" in refusal(clawloop("recipe", "show", "--policy", "nobody", **here))


def test_a_rank_that_engines_do_not_take_is_refused(here: dict[str, str], tmp_path: Path) -> None:
    large = Recipe.model_validate({"name": "large", "train": {"lora": {"rank": 32}}})
    file = tmp_path / "large.toml"
    file.write_text("name = 'large'\ntrain.lora.rank = 32\n")
    told = refusal(clawloop("recipe", "set", str(file), **here))
    assert "train.lora.rank: 32, but engines take 16 at most" in told
    assert "CLAWLOOP_MAX_LORA_RANK" in told
    with pytest.raises(ValidationError, match="engines take one of 1, 8, 16, 32"):
        Settings(max_lora_rank=17)
    url = here["DATABASE_URL"]
    with pytest.raises(RecipeRejected, match="engines take 16"):
        asyncio.run(prepare(url, "tiny", [], [], {}, recipe=large))
    assert said("recipe", "show", here=here)["name"] == "combined"
    wide = here | {"CLAWLOOP_MAX_LORA_RANK": "32"}
    assert clawloop("recipe", "set", str(file), **wide).returncode == 0
    # Started without it later, no engine could load what is learned.
    with pytest.raises(RecipeRejected, match="engines take 16"):
        asyncio.run(prepare(url, "tiny", [], [], {}))
    asyncio.run(prepare(url, "tiny", [], [], {}, max_lora_rank=32))


def test_up_and_show_say_what_to_do_about_a_stored_recipe_that_is_none_any_more(here: dict[str, str]) -> None:
    url = here["DATABASE_URL"]
    older = "UPDATE recipes SET content = jsonb_set(content::jsonb, '{train,train_thinking}', 'false')::json"
    execute(url, older)
    told = refusal(clawloop("recipe", "show", **here))
    assert told.startswith("clawloop: Policy 'default': its recipe cannot be used any more: train.train_thinking")
    assert "set another with `clawloop recipe set`" in told
    with pytest.raises(SetupError, match=r"recipe of policy 'default' .*train\.train_thinking.*--recipe FILE"):
        asyncio.run(prepare(url, "tiny", [], [], {}))
    asyncio.run(prepare(url, "tiny", [], [], {}, recipe=Recipe(name="other")))
    asyncio.run(prepare(url, "tiny", [], [], {}))
