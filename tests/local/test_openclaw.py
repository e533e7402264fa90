"""What OpenClaw gets from us: its configuration and a skill."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from clawloop.app.cli.main import app
from clawloop.app.cli.openclaw_config import configuration, merged
from clawloop.app.processes.endpoints import RuntimeAddresses, write_runtime_file

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "openclaw"
GATEWAY = "http://127.0.0.1:30000"


def kept(name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return parsed


def test_the_configuration_is_the_file_that_is_documented() -> None:
    assert configuration(GATEWAY, "YOUR_CHAT_KEY", 32768, 8192) == kept("openclaw.json")


def test_merging_keeps_what_is_not_ours_and_replaces_a_provider_that_leads_here() -> None:
    own = kept("original.json")
    own["models"]["providers"]["other"] = {"baseUrl": "http://elsewhere/v1", "models": []}
    own |= {"channels": {"telegram": {"enabled": True}}}
    own["agents"] = {"defaults": {"model": {"primary": "qwen/qwen3-4b", "fallbacks": ["other/x"]}, "workspace": "~/w"}}
    before = json.dumps(own)
    made = merged(own, configuration(GATEWAY, "k", 40960, 4096), GATEWAY)
    assert json.dumps(own) == before
    assert set(made["models"]["providers"]) == {"other", "clawloop"}
    assert made["models"]["providers"]["clawloop"]["models"][0]["contextWindow"] == 40960
    assert made["channels"] == own["channels"]
    assert made["agents"]["defaults"]["model"] == {"primary": "clawloop/policy", "fallbacks": ["other/x"]}
    assert made["agents"]["defaults"]["workspace"] == "~/w"
    assert merged(made, configuration(GATEWAY, "k", 40960, 4096), GATEWAY) == made


def test_the_command_takes_the_key_of_the_data_folder(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(json.dumps({"chat": "cl-mine", "admin": "cl-other"}))
    own = tmp_path / "openclaw.json"
    own.write_text(json.dumps(kept("original.json")))
    run = ["openclaw-config", "--data", str(tmp_path), "--merge", str(own), "--url", "http://127.0.0.1:4000/v1"]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0
    provider = json.loads(result.output)["models"]["providers"]["clawloop"]
    assert (provider["baseUrl"], provider["apiKey"]) == ("http://127.0.0.1:4000/v1", "cl-mine")


def test_address_and_limits_are_those_of_up_on_the_data_folder(tmp_path: Path) -> None:
    write_runtime_file(tmp_path, RuntimeAddresses("postgresql://x", "x:7233", None, "http://127.0.0.1:4000", 16384))
    result = CliRunner().invoke(app, ["openclaw-config", "--data", str(tmp_path), "--key", "k"])
    provider = json.loads(result.output)["models"]["providers"]["clawloop"]
    assert provider["baseUrl"] == "http://127.0.0.1:4000/v1"
    assert {(model["contextWindow"], model["maxTokens"]) for model in provider["models"]} == {(16384, 4096)}
    given = ["--url", GATEWAY, "--context", "65536", "--max-tokens", "100"]
    result = CliRunner().invoke(app, ["openclaw-config", "--data", str(tmp_path), "--key", "k", *given])
    provider = json.loads(result.output)["models"]["providers"]["clawloop"]
    assert (provider["baseUrl"], provider["models"][0]["maxTokens"]) == (f"{GATEWAY}/v1", 100)


@pytest.mark.parametrize(("content", "said"), [("{not json", "cannot be read"), ("[]", "no JSON object")])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "openclaw.json").write_text(content)
    run = ["openclaw-config", "--key", "k", "--merge", str(tmp_path / "openclaw.json")]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 1
    assert said in result.stderr


def test_each_command_of_the_skill_is_one() -> None:
    text = (FOLDER / "SKILL.md").read_text()
    front = re.match(r"---\nname: clawloop\ndescription: (.{20,160})\nversion: [\d.]+\nmetadata: (\{.*\})\n---\n", text)
    assert front is not None
    assert json.loads(front[2])["openclaw"]["requires"] == {"bins": ["clawloop"]}
    commands = re.findall(r"`clawloop ([^`]+)`", text)
    assert len(commands) >= 10
    group = typer.main.get_command(app)
    for command in commands:
        words = shlex.split(command)
        at: Any = group
        while words and words[0] in getattr(at, "commands", {}):
            at = at.commands[words.pop(0)]
        assert not hasattr(at, "commands"), command
        options = {option for parameter in at.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options
