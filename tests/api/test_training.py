"""`/admin/v1/training` and `/admin/v1/policies`, over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from clawloop.core.contracts.training import OperatorAction, OperatorChange, SampleState, StepState, VersionRef
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.recipes.recipe import Recipe, parse_recipe
from tests.api.conftest import Gateway
from tests.fakes.ledger import FakeStep, FakeVersion

TRAINING = "/admin/v1/training"
POLICY = "/admin/v1/policies/default"


async def get(gateway: Gateway, path: str) -> dict[str, Any]:
    async with gateway.client(gateway.admin_key) as client:
        answer = await client.get(path)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def post(gateway: Gateway, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    async with gateway.client(gateway.admin_key) as client:
        answer = await (client.post(path) if body is None else client.post(path, json=body))
    return answer.status_code, answer.json()


def with_versions(gateway: Gateway, count: int) -> None:
    """Give the policy this many versions."""
    ledger = gateway.ledger
    recipe = ledger.policies["default"].recipe
    assert recipe is not None
    for n in range(1, count + 1):
        ledger.steps["default", n] = FakeStep(n - 1, 0, recipe, [], StepState.COMMITTED)
        ref = VersionRef("default", n, n - 1, f"default/v{n}-0123456789ab", "ab" * 32)
        ledger.versions["default", n] = FakeVersion(n - 1, ref, ledger.now)
        ledger.policies["default"].head = n
    ledger.set_active("default", 0)


async def test_training_shows_what_it_waits_for(fresh_gateway: Gateway) -> None:
    for _ in range(5):
        fresh_gateway.ledger.add_sample("default")
    fresh_gateway.ledger.waiting_turns = 3
    assert await get(fresh_gateway, TRAINING) == {
        "policy": "default",
        "state": "waiting",
        "reason": "5 of 16 samples; 3 turns wait for their next state or judge",
        "ready": 5,
        "needed": 16,
        "judging": 3,
        "step": 1,
        "version": 0,
        "head": 0,
        "pinned": None,
        "closed_seconds": None,
        "progress": None,
    }


async def test_a_pause_shows_its_reason_and_a_resume_ends_it(fresh_gateway: Gateway) -> None:
    status, body = await post(fresh_gateway, f"{TRAINING}/pause?policy=default", {"reason": "the machine is needed"})
    assert (status, body["state"], body["reason"]) == (200, "paused", "paused: the machine is needed")
    assert (await get(fresh_gateway, TRAINING))["state"] == "paused"
    status, body = await post(fresh_gateway, f"{TRAINING}/resume")
    assert (status, body["state"]) == (200, "waiting")
    assert fresh_gateway.operator.changes == [
        ("default", OperatorChange(OperatorAction.PAUSE, "the machine is needed")),
        ("default", OperatorChange(OperatorAction.RESUME, "as before")),
    ]


async def test_a_resume_may_retry_quarantined_samples(fresh_gateway: Gateway) -> None:
    sample = fresh_gateway.ledger.add_sample("default")
    fresh_gateway.ledger.samples[sample].end(SampleState.QUARANTINED, TurnOutcome.QUARANTINED, "step 1: NaN")
    assert (await post(fresh_gateway, f"{TRAINING}/resume", {}))[1]["ready"] == 0
    assert (await post(fresh_gateway, f"{TRAINING}/resume", {"retry": True}))[1]["ready"] == 1


async def test_changes_hold_while_temporal_is_away(fresh_gateway: Gateway) -> None:
    fresh_gateway.operator.available = False
    with_versions(fresh_gateway, 1)
    for path, body in (
        (f"{TRAINING}/pause", {"reason": "now"}),
        (f"{TRAINING}/resume", {"retry": True}),
        (f"{POLICY}/pin", {"version": 1}),
        (f"{POLICY}/pin", {"version": None}),
        (f"{POLICY}/roll-back", {"version": 0}),
        (f"{POLICY}/recipe", {"name": "other"}),
    ):
        status, body = await post(fresh_gateway, path, body)
        assert status == 200, body
    assert (await get(fresh_gateway, TRAINING))["head"] == 0


async def test_a_roll_back_goes_on_from_an_earlier_version(fresh_gateway: Gateway) -> None:
    with_versions(fresh_gateway, 3)
    status, body = await post(fresh_gateway, f"{POLICY}/roll-back", {"version": 2})
    assert (status, body["head"], body["step"]) == (200, 2, 4)
    assert fresh_gateway.operator.changes == [("default", OperatorChange(OperatorAction.ROLL_BACK, "to version 2"))]
    shown = (await get(fresh_gateway, f"{POLICY}/versions"))["versions"]
    assert [(version["n"], version["state"]) for version in shown] == [
        (0, "active, on the path"),
        (1, "on the path"),
        (2, "head"),
        (3, "rolled back"),
    ]


async def test_a_pinned_version_is_shown_and_unpinned_by_null(fresh_gateway: Gateway) -> None:
    with_versions(fresh_gateway, 2)
    assert (await post(fresh_gateway, f"{POLICY}/pin", {"version": 1}))[1]["pinned"] == 1
    status, refused = await post(fresh_gateway, f"{POLICY}/roll-back", {"version": 2})
    assert (status, refused["code"]) == (409, "version_pinned")
    (policy,) = (await get(fresh_gateway, "/admin/v1/policies"))["policies"]
    assert (policy["base_model"], policy["training"]["pinned"]) == ("tiny", 1)
    assert (await post(fresh_gateway, f"{POLICY}/pin", {"version": None}))[1]["pinned"] is None
    changes = [change for _, change in fresh_gateway.operator.changes]
    assert changes == [OperatorChange(OperatorAction.PIN, detail) for detail in ("version 1", "none")]


async def test_a_recipe_is_shown_changed_and_set(fresh_gateway: Gateway) -> None:
    fresh_gateway.ledger.add_sample("default")
    shown = await get(fresh_gateway, f"{POLICY}/recipe")
    assert parse_recipe(shown) == Recipe(name="combined")
    shown["train"]["batch_samples"] = 4
    status, body = await post(fresh_gateway, f"{POLICY}/recipe", shown)
    assert (status, body["ready"], body["needed"]) == (200, 1, 4)
    status, body = await post(fresh_gateway, f"{POLICY}/recipe", {"name": "combined", "signal": {"m": 5}})
    assert (status, body["ready"], body["needed"]) == (200, 0, 16)
    changes = [change for _, change in fresh_gateway.operator.changes]
    assert [change.action for change in changes] == [OperatorAction.SET_RECIPE] * 2
    assert all(change.detail.startswith("combined ") for change in changes)


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        (f"{TRAINING}/pause", {}, 400, "reason"),
        (f"{TRAINING}/pause", {"reason": "  "}, 400, "reason"),
        (f"{TRAINING}/pause", {"reason": "x" * 501}, 400, "reason"),
        (f"{TRAINING}/pause", {"reason": "x", "for": "1 h"}, 400, "for"),
        (f"{TRAINING}/pause?policy=nobody", {"reason": "x"}, 404, "policy"),
        (f"{TRAINING}/resume", {"retry": "yes"}, 400, "retry"),
        (f"{POLICY}/roll-back", {"version": -1}, 400, "version"),
        (f"{POLICY}/roll-back", {"version": 2**31}, 400, "version"),
        (f"{POLICY}/roll-back", {"version": 7}, 404, "version"),
        (f"{POLICY}/roll-back", {"version": None}, 400, "version"),
        (f"{POLICY}/pin", {}, 400, "version"),
        (f"{POLICY}/recipe", {}, 400, "name"),
        (f"{POLICY}/recipe", {"name": "other", "train": {"batch_sample": 4}}, 400, "train.batch_sample"),
        (f"{POLICY}/recipe", {"name": "other", "train": {"lora": {"rank": 32}}}, 400, "train.lora.rank"),
        ("/admin/v1/policies/nobody/recipe", {"name": "other"}, 404, "policy"),
        (f"{POLICY}/pin", {"version": "2"}, 400, "version"),
        ("/admin/v1/policies/no%00body/pin", {"version": 0}, 404, "policy"),
    ],
)
async def test_a_bad_request_is_refused_with_its_field(
    fresh_gateway: Gateway, path: str, body: Any, status: int, field: str
) -> None:
    answered, problem = await post(fresh_gateway, path, body)
    assert (answered, problem["field"]) == (status, field)
    assert problem["detail"]
    assert fresh_gateway.operator.changes == []


async def test_training_needs_an_admin_key(fresh_gateway: Gateway) -> None:
    async with fresh_gateway.client() as client:
        assert (await client.get(TRAINING)).status_code == 403
        assert (await client.post(f"{TRAINING}/pause", json={"reason": "x"})).status_code == 403
        assert (await client.post(f"{POLICY}/roll-back", json={"version": 0})).status_code == 403
        assert (await client.get("/admin/v1/policies")).status_code == 403


async def test_without_the_store_the_answer_is_503(fresh_gateway: Gateway) -> None:
    fresh_gateway.ledger.available = False
    async with fresh_gateway.client(fresh_gateway.admin_key) as client:
        answer = await client.get(TRAINING)
    assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")


async def test_a_policy_is_made_like_another(fresh_gateway: Gateway) -> None:
    status, made = await post(fresh_gateway, "/admin/v1/policies", {"name": "mine"})
    assert (status, made["policy"], made["version"]) == (201, "mine", 0)
    recipe = {"name": "binary", "train": {"lora": {"rank": 64}}}
    for body, expected, code in (
        ({"name": "mine"}, 409, "policy_exists"),
        ({"name": "policy"}, 400, "invalid_value"),
        ({"name": "x-v7"}, 400, "invalid_value"),
        ({"name": "a/b"}, 400, "invalid_value"),
        ({"name": "yours", "like": "nobody"}, 404, "policy_not_found"),
        ({"name": "yours", "version": 7}, 404, "version_not_found"),
        ({"name": "yours", "version": -1}, 400, "invalid_value"),
        ({"name": "yours", "version": "1"}, 400, "invalid_value"),
        ({"name": "yours", "recipe": recipe}, 400, "invalid_recipe"),
        ({}, 400, "missing_required_parameter"),
    ):
        status, refused = await post(fresh_gateway, "/admin/v1/policies", body)
        assert (status, refused["code"]) == (expected, code)
    async with fresh_gateway.client() as client:
        assert (await client.post("/admin/v1/policies", json={"name": "yours"})).status_code == 403


async def test_a_policy_begins_from_a_version_and_its_workflow_is_woken(fresh_gateway: Gateway) -> None:
    with_versions(fresh_gateway, 2)
    status, made = await post(fresh_gateway, "/admin/v1/policies", {"name": "mine", "version": 1})
    assert (status, made["version"], made["head"], made["step"]) == (201, 0, 1, 2)
    shown = (await get(fresh_gateway, "/admin/v1/policies/mine/versions"))["versions"]
    assert [version["origin"] for version in shown] == [None, {"policy": "default", "n": 1}]
    assert fresh_gateway.operator.waiting == ["mine"]
    fresh_gateway.operator.available = False
    status, made = await post(fresh_gateway, "/admin/v1/policies", {"name": "yours", "like": "mine", "version": 1})
    assert (status, made["head"]) == (201, 1)
    fresh_gateway.ledger.steps["default", 2].state = StepState.REJECTED
    fresh_gateway.ledger.versions["default", 1].removed = True
    for version, code in ((2, "version_not_accepted"), (1, "version_removed")):
        status, refused = await post(fresh_gateway, "/admin/v1/policies", {"name": "hers", "version": version})
        assert (status, refused["code"]) == (409, code)


async def test_a_policy_is_retired_once(fresh_gateway: Gateway) -> None:
    await post(fresh_gateway, "/admin/v1/policies", {"name": "mine"})
    status, view = await post(fresh_gateway, "/admin/v1/policies/mine/retire")
    assert (status, view["state"]) == (200, "paused")
    for policy, code in (("mine", "policy_retired"), ("default", "policy_needed")):
        status, refused = await post(fresh_gateway, f"/admin/v1/policies/{policy}/retire")
        assert (status, refused["code"]) == (409, code)
