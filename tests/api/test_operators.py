"""Operators' routes over HTTP."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from clawloop.core.contracts.episodes import (
    Ending,
    EpisodeState,
    EpisodeView,
    GroupState,
    GroupView,
    RolloutsPlan,
)
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.training import OperatorAction, OperatorChange, SampleState, StepState, VersionRef
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import new_episode_id, new_rollout_group_id, new_turn_id
from clawloop.core.recipes.recipe import Recipe, parse_recipe
from clawloop.environments.choice import ENVIRONMENTS
from clawloop.operations.rollouts import EXAMPLES
from tests.api.chat_requests import chat
from tests.api.conftest import Gateway
from tests.fakes.ledger import FakeStep, FakeVersion

# `/admin/v1/engines`, `/keys`, `/check` and single turns, over HTTP.


async def test_turns_are_shown_by_reply_by_beginning_and_by_number(gateway: Gateway) -> None:
    reply = await chat(gateway, session_id="mine")
    async with gateway.client(gateway.admin_key) as client:
        whole = (await client.get(f"/admin/v1/turns/{reply}")).json()
        assert (whole["turn"]["response_id"], whole["tokens"]) == (reply, None)
        assert whole["messages"][0]["role"] == "user"
        assert whole["response"]["role"] == "assistant"
        for reference in (whole["turn"]["short_id"], "mine:1", "last"):
            why = (await client.get(f"/admin/v1/turns/{reference}/why")).json()
            assert why == whole["turn"]
        tokens = (await client.get(f"/admin/v1/turns/{reply}", params={"tokens": "true"})).json()["tokens"]
        assert len(tokens["response_ids"]) == len(tokens["logprobs"])
        session = (await client.get("/admin/v1/sessions/mine", params={"content": "true"})).json()
        [exchange] = session["conversation"]
        assert exchange["reply"] == whole["response"]
        assert session["session"]["workflow_id"] == f"session/{session['session']['id']}"


async def test_the_beginning_of_several_ids_is_400(gateway: Gateway) -> None:
    replies = [await chat(gateway, session_id="several") for _ in range(2)]
    beginning = replies[0].removeprefix("chatcmpl-")[:8]
    async with gateway.client(gateway.admin_key) as client:
        answer = await client.get(f"/admin/v1/turns/{beginning}/why")
        assert (answer.status_code, answer.json()["code"]) == (400, "ambiguous_id")
        assert (await client.get("/admin/v1/turns/nobody")).status_code == 404


async def test_keys_are_made_listed_and_ended(gateway: Gateway) -> None:
    async with gateway.client(gateway.admin_key) as client:
        made = await client.post("/admin/v1/keys", json={"scopes": ["admin"], "name": "laptop"})
        assert made.status_code == 201
        new = made.json()
        async with gateway.client(new["key"]) as other:
            listed = (await other.get("/admin/v1/keys")).json()["keys"]
        assert [key["name"] for key in listed if key["prefix"] == new["prefix"]] == ["laptop"]
        assert not any("key" in key for key in listed)
        ended = await client.delete(f"/admin/v1/keys/{new['prefix'][:9]}")
        assert ended.json() == {"prefix": new["prefix"]}
        assert (await client.delete("/admin/v1/keys/laptop")).status_code == 404
        assert (await client.post("/admin/v1/keys")).json()["scopes"] == ["chat"]
        assert (await client.post("/admin/v1/keys", json={"scopes": ["root"]})).status_code == 400


async def test_a_key_ends_after_the_days_it_was_made_for(gateway: Gateway) -> None:
    async with gateway.client(gateway.admin_key) as client:
        new = (await client.post("/admin/v1/keys", json={"name": "guest", "days": 7})).json()
        left = datetime.fromisoformat(new["expires_at"]) - datetime.now(UTC)
        assert timedelta(days=6) < left <= timedelta(days=7)
        listed = {key["prefix"]: key["expires_at"] for key in (await client.get("/admin/v1/keys")).json()["keys"]}
        assert listed[new["prefix"]] == new["expires_at"]
        use = (await client.get(f"/admin/v1/keys/{new['prefix']}/limits")).json()
        assert use["expires_at"] == new["expires_at"]
        for wrong in (0, -1, 36_501, "7", True):
            assert (await client.post("/admin/v1/keys", json={"days": wrong})).status_code == 400
    ended = gateway.keys.add("default", {Scope.CHAT}, "ended", datetime.now(UTC))
    async with gateway.client(new["key"]) as guest, gateway.client(ended) as late:
        assert (await guest.get("/v1/models")).status_code == 200
        refused = await late.get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_engines_are_added_drained_and_removed(fresh_gateway: Gateway) -> None:
    async with fresh_gateway.client(fresh_gateway.admin_key) as client:
        only = await client.post("/admin/v1/engines/e0/drain")
        assert (only.status_code, only.json()["code"]) == (409, "last_engine")
        added = (await client.post("/admin/v1/engines", json={"url": "http://127.0.0.1:1"})).json()
        assert (added["engine"]["healthy"], len(added["warnings"])) == (False, 1)
        refused = await client.post("/admin/v1/engines", json={"url": "http://127.0.0.1:2", "require_guard": True})
        assert (refused.status_code, refused.json()["field"]) == (400, "url")
        assert (await client.post("/admin/v1/engines", json={"url": "ftp://x"})).status_code == 400
        drained = (await client.post("/admin/v1/engines/e0/drain", json={})).json()
        assert (drained["id"], drained["draining"], drained["healthy"]) == ("e0", True, True)
        assert (await client.delete("/admin/v1/engines/127")).status_code == 409
        assert (await client.delete("/admin/v1/engines/127", params={"force": "true"})).status_code == 204
        listed = (await client.get("/admin/v1/engines")).json()["engines"]
        assert [engine["id"] for engine in listed] == ["e0"]


async def test_the_ledger_is_checked(gateway: Gateway) -> None:
    async with gateway.client(gateway.admin_key) as client:
        report = (await client.get("/admin/v1/check")).json()
        assert (report["violations"], report["adapters"]) == ([], 0)
        report = (await client.get("/admin/v1/check", params={"files": "true"})).json()
        assert report["violations"] == [{"invariant": "files", "row": "v1"}]


async def test_a_key_is_replaced_while_chats_go_on(fresh_gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/security.md says: make, change over, revoke; a request with either key is answered meanwhile."""
    old = fresh_gateway.keys.add("default", {Scope.CHAT}, "phone-1")
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
    async with fresh_gateway.client(fresh_gateway.admin_key) as admin, fresh_gateway.client(old) as before:
        assert (await before.post("/v1/chat/completions", json=body)).status_code == 200
        new = (await admin.post("/admin/v1/keys", json={"name": "phone-2"})).json()["key"]
        async with fresh_gateway.client(new) as after:
            answers = [await client.post("/v1/chat/completions", json=body) for client in (before, after)]
            assert [answer.status_code for answer in answers] == [200, 200]
            assert (await admin.delete("/admin/v1/keys/phone-1")).status_code == 200
            monkeypatch.setattr("api.auth.FRESH_SECONDS", 0.0)  # as if 30 s had passed
            assert (await before.post("/v1/chat/completions", json=body)).status_code == 401
            assert (await after.post("/v1/chat/completions", json=body)).status_code == 200


async def test_the_status_names_what_is_wrong(fresh_gateway: Gateway) -> None:
    async with fresh_gateway.client(fresh_gateway.admin_key) as client:
        status = (await client.get("/admin/v1/status")).json()
        assert (status["engines"], status["engines_answering"], status["problems"]) == (1, 1, [])
        assert [policy["policy"] for policy in status["policies"]] == ["default"]
        await client.post("/admin/v1/engines/e0/drain", json={"force": True})
        await client.post("/admin/v1/training/pause", json={"reason": "holiday"})
        status = (await client.get("/admin/v1/status")).json()
    assert status["problems"] == [
        "every engine is drained: `clawloop engine drain --undo e0`",
        "training of default is paused: holiday",
    ]


# `/admin/v1/training` and `/admin/v1/policies`, over HTTP.

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
        "reason": "5 of 16 samples for the next step; 3 replies wait for a reaction or a verdict",
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


async def test_a_roll_back_takes_the_recipe_to_learn_by_from_there(fresh_gateway: Gateway) -> None:
    with_versions(fresh_gateway, 3)
    recipe = {"name": "other", "train": {"batch_samples": 4}}
    status, body = await post(fresh_gateway, f"{POLICY}/roll-back", {"version": 2, "recipe": recipe})
    assert (status, body["head"], body["needed"]) == (200, 2, 4)
    [(_, change)] = fresh_gateway.operator.changes
    assert change.detail == f"to version 2 by other {parse_recipe(recipe).hash[:12]}"


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


BAD: tuple[tuple[str, dict[str, Any], int, str], ...] = (
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
    (f"{POLICY}/roll-back", {"version": 0, "recipe": {"train": {}}}, 400, "name"),
    (f"{POLICY}/pin", {}, 400, "version"),
    (f"{POLICY}/recipe", {}, 400, "name"),
    (f"{POLICY}/recipe", {"name": "other", "train": {"batch_sample": 4}}, 400, "train.batch_sample"),
    (f"{POLICY}/recipe", {"name": "other", "train": {"lora": {"rank": 32}}}, 400, "train.lora.rank"),
    ("/admin/v1/policies/nobody/recipe", {"name": "other"}, 404, "policy"),
    (f"{POLICY}/pin", {"version": "2"}, 400, "version"),
    ("/admin/v1/policies/no%00body/pin", {"version": 0}, 404, "policy"),
)


async def test_a_bad_request_is_refused_with_its_field(fresh_gateway: Gateway) -> None:
    for path, body, status, field in BAD:
        answered, problem = await post(fresh_gateway, path, body)
        assert (answered, problem["field"]) == (status, field), (path, body)
        assert problem["detail"], (path, body)
        assert fresh_gateway.operator.changes == [], (path, body)


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


# `GET /admin/v1/sessions`, over HTTP.


async def test_sessions_are_listed_in_pages_and_shown_with_the_reason_for_each_outcome(gateway: Gateway) -> None:
    for name in ("a", "b", "c"):
        await chat(gateway, session_id=name)
    await chat(gateway, session_id="c", turn_type="side")
    async with gateway.client(gateway.admin_key) as client:
        first = (await client.get("/admin/v1/sessions", params={"limit": 2})).json()
        rest = (await client.get("/admin/v1/sessions", params={"limit": 2, "after": first["next"]})).json()
        names = [session["external_id"] for session in first["sessions"] + rest["sessions"]]
        assert (names, rest["next"]) == (["c", "b", "a"], None)
        shown = (await client.get(f"/admin/v1/sessions/{first['sessions'][0]['id']}")).json()
        assert [(turn["kind"], turn["outcome"]) for turn in shown["turns"]] == [("main", "waiting"), ("side", "side")]
        assert shown["turns"][1]["why"] == "body turn_type: side"
        missing = await client.get(f"/admin/v1/sessions/{new_turn_id()}")
        assert (missing.status_code, missing.headers["content-type"]) == (404, "application/problem+json")
        assert (await client.get("/admin/v1/sessions", params={"state": "bored"})).status_code == 400


# `/admin/v1/rollouts`, `/rollout-groups` and `/episodes`, over HTTP.

ROLLOUTS = "/admin/v1/rollouts"
NOW = datetime(2026, 1, 2, tzinfo=UTC)


async def send(gateway: Gateway, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    async with gateway.client(gateway.admin_key) as client:
        answer = await client.request(method, path, json=body)
    return answer.status_code, answer.json()


def group_of_two() -> tuple[GroupView, list[EpisodeView]]:
    group = GroupView(
        new_rollout_group_id(), "default", "tool-call", "train-0", 2, GroupState.SETTLED, "why", 2, 0.5, NOW, NOW
    )
    episodes = [
        EpisodeView(
            id=new_episode_id(),
            group=group.id,
            policy="default",
            environment="tool-call",
            task="train-0",
            place=place,
            attempt=1,
            state=EpisodeState.SCORED,
            ending=Ending.COMPLETED,
            reward=float(place),
            advantage=2.0 * place - 1,
            reason=None,
            artifact_sha256="ab" * 32,
            turns=2,
            tokens=30,
            trained=0,
            started_at=NOW,
            ended_at=NOW,
        )
        for place in range(2)
    ]
    return group, episodes[::-1]


async def test_rollouts_are_started_paused_and_shown(fresh_gateway: Gateway) -> None:
    gateway = fresh_gateway
    assert (await send(gateway, "GET", ROLLOUTS))[1]["state"] == "never started"
    status, body = await send(gateway, "POST", f"{ROLLOUTS}/pause", {"reason": "lunch"})
    assert (status, body["code"]) == (404, "rollouts_not_found")
    status, body = await send(gateway, "POST", f"{ROLLOUTS}/start", {"environment": "tool-call", "size": 4})
    assert (status, body["state"]) == (200, "running")
    plan = {"environment": "tool-call", "size": 4, "groups": 2, "barren_limit": 20, "curriculum": False}
    assert body["plan"] == plan
    assert gateway.rollouts.plan == RolloutsPlan("tool-call", 4, 2, 20)
    chosen = {"environment": "tool-call", "size": 4, "curriculum": True}
    assert (await send(gateway, "POST", f"{ROLLOUTS}/start", chosen))[1]["plan"] == plan | {"curriculum": True}
    gateway.operator.available = False  # Temporal is away: PostgreSQL holds the change
    status, body = await send(gateway, "POST", f"{ROLLOUTS}/pause?policy=default", {"reason": "lunch"})
    assert (status, body["state"], body["reason"]) == (200, "paused", "lunch")
    assert gateway.operator.rollouts == ["default", "default"]
    assert (await send(gateway, "GET", f"{ROLLOUTS}?policy=other"))[0] == 404


async def test_an_environment_without_a_worker_is_said_at_once_and_until_one_comes(fresh_gateway: Gateway) -> None:
    gateway, rollouts = fresh_gateway, fresh_gateway.rollouts

    async def said(method: str, path: str, body: Any = None) -> str:
        line = (await send(gateway, method, path, body))[1]["no_worker"]
        assert isinstance(line, str)
        return line

    assert await said("GET", ROLLOUTS) == ""  # nothing was started, nothing is missing
    line = "no worker serves the environment 'terminal', and its episodes wait: "
    line += "`clawloop worker environment --environment terminal` starts one"
    assert await said("POST", f"{ROLLOUTS}/start", {"environment": "terminal"}) == line
    assert await said("POST", f"{ROLLOUTS}/pause", {"reason": "lunch"}) == line
    assert await said("GET", ROLLOUTS) == line
    # A worker whose places are all taken asks for nothing.
    rollouts.open = [new_rollout_group_id()]
    assert await said("GET", ROLLOUTS) == line
    rollouts.busy = set(rollouts.open)
    assert await said("GET", ROLLOUTS) == ""
    rollouts.busy = set()
    rollouts.available = False  # nobody can say, and that Temporal is away is said elsewhere
    assert await said("GET", ROLLOUTS) == ""
    rollouts.available = True
    rollouts.asking.add("terminal")
    assert await said("GET", ROLLOUTS) == ""
    rollouts.asking.clear()
    problems = (await send(gateway, "GET", "/admin/v1/status"))[1]["problems"]
    assert line not in problems  # while paused nothing waits
    await said("POST", f"{ROLLOUTS}/start", {"environment": "terminal"})
    assert line in (await send(gateway, "GET", "/admin/v1/status"))[1]["problems"]
    of_a_folder = await said("POST", f"{ROLLOUTS}/start", {"environment": "my tasks"})
    assert "`clawloop worker environment --tasks 'my tasks'`" in of_a_folder
    assert "`clawloop-environment --verifiers 'my tasks'`" in of_a_folder


def test_environments_that_a_worker_is_named_are_known() -> None:
    assert set(EXAMPLES) == set(ENVIRONMENTS)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "environment"),
        ({"environment": " "}, "environment"),
        ({"environment": "tool-call", "size": 1}, "size"),
        ({"environment": "tool-call", "groups": "2"}, "groups"),
        ({"environment": "tool-call", "barren": 0}, "barren"),
        ({"environment": "tool-call", "curriculum": "yes"}, "curriculum"),
        ({"environment": "tool-call", "more": 1}, "more"),
    ],
)
async def test_a_wrong_field_is_named_and_starts_nothing(
    fresh_gateway: Gateway, body: dict[str, Any], field: str
) -> None:
    status, answer = await send(fresh_gateway, "POST", f"{ROLLOUTS}/start", body)
    assert (status, answer["field"]) == (400, field)
    assert fresh_gateway.rollouts.plan is None


async def test_groups_and_episodes_are_listed_in_pages_and_shown(fresh_gateway: Gateway) -> None:
    gateway = fresh_gateway
    group, (second, first) = group_of_two()
    gateway.episodes.all_groups, gateway.episodes.all_episodes = [group], [second, first]
    _, groups = await send(gateway, "GET", "/admin/v1/rollout-groups")
    assert [(each["id"], each["mean_reward"]) for each in groups["groups"]] == [(str(group.id), 0.5)]
    assert groups["next"] is None
    path = f"/admin/v1/episodes?group={group.id}&limit=1"
    _, page = await send(gateway, "GET", path)
    _, rest = await send(gateway, "GET", f"{path}&after={page['next']}")
    assert [each["id"] for each in page["episodes"] + rest["episodes"]] == [str(second.id), str(first.id)]
    assert rest["next"] is None
    _, shown = await send(gateway, "GET", f"/admin/v1/episodes/{first.id}")
    assert (shown["state"], shown["ending"], shown["reward"], shown["advantage"]) == ("scored", "completed", 0.0, -1.0)
    assert (await send(gateway, "GET", f"/admin/v1/episodes/{new_episode_id()}"))[0] == 404
    assert (await send(gateway, "GET", "/admin/v1/episodes/nonsense"))[1]["code"] == "episode_not_found"
    assert (await send(gateway, "GET", "/admin/v1/episodes/last"))[1]["id"] == str(second.id)
    assert (await send(gateway, "GET", f"/admin/v1/episodes?group={new_rollout_group_id()}"))[1]["code"] == (
        "group_not_found"
    )
