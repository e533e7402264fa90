"""What a model name stands for."""

from __future__ import annotations

import pytest

from api.chat.models import ModelChoice, resolve_name
from clawloop.core.contracts.serving import Policy
from clawloop.core.errors import RequestRejected

POLICY = Policy("default", "Qwen/Qwen3-4B", ("qwen3-4b",), 7, {})


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("policy", ModelChoice(None, side=False)),
        ("qwen3-4b", ModelChoice(None, side=False)),
        ("policy-side", ModelChoice(None, side=True)),
        ("default-v7", ModelChoice(7, side=False)),
        ("default-v0", ModelChoice(0, side=False)),
        ("Qwen/Qwen3-4B", ModelChoice(0, side=False)),
    ],
)
def test_a_name_stands_for_a_version_or_the_active_one(name: str, choice: ModelChoice) -> None:
    assert resolve_name(name, POLICY, frozenset({7})) == choice


def test_the_active_version_exists_while_no_engine_has_it() -> None:
    assert resolve_name("default-v7", POLICY, frozenset()) == ModelChoice(7, side=False)


def test_the_base_models_name_may_be_an_alias() -> None:
    policy = Policy("default", "qwen3-4b", ("qwen3-4b",), 7, {})
    assert resolve_name("qwen3-4b", policy, frozenset()) == ModelChoice(None, side=False)


@pytest.mark.parametrize("name", ["", "gpt-4", "default-v8", "default-v6", "other-v7", "Qwen/Qwen3-4B-side"])
def test_other_names_are_refused_with_a_list_of_aliases(name: str) -> None:
    with pytest.raises(RequestRejected, match="`policy` or `qwen3-4b`") as raised:
        resolve_name(name, POLICY, frozenset({7}))
    assert raised.value.status == 404
