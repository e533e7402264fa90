"""Requests generated from the OpenAPI description: never a 500, and every error in its shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error, response_schema_conformance

from clawloop.app.local.services.postgres import EmbeddedPostgres
from db.schema import migrate
from tests.api.conftest import Gateway
from tests.api.gateway_thread import gateway_thread
from tests.api.known_ids import KNOWN_IDS, described_requests
from tests.api.test_any_shape import EXAMPLES, PROPER, REQUESTS, error_fields, headers_of
from tests.conftest import database_address, execute

CHAT = "/v1/chat/completions"
REPLIES = {"completion_id": CHAT, "response_id": "/v1/responses"}
# Lines are sent as they are generated, JSON or not.
schemathesis.serializer.alias("application/x-ndjson", "text/plain")
# Bytes, an archive or not.
schemathesis.serializer.alias("application/x-tar", "application/octet-stream")


@pytest.fixture(scope="module")
def gateway_in_thread(tmp_path_factory: pytest.TempPathFactory, postgres_server: EmbeddedPostgres) -> Iterator[Gateway]:
    # Not the database of other tests: `last` would be whatever they left there, or nothing.
    execute(postgres_server.url, "CREATE DATABASE fuzzed")
    url = database_address(postgres_server.url, "fuzzed")
    migrate(url)
    with gateway_thread(tmp_path_factory.mktemp("fuzz"), url) as (_, gateway):
        yield gateway


@pytest.fixture(scope="module")
def without_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway_thread(tmp_path_factory.mktemp("without-engine")) as (thread, gateway):
        thread.stop_engine()
        yield gateway


@pytest.fixture(scope="module")
def without_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Without PostgreSQL, and with a key that it knew."""
    with gateway_thread(tmp_path_factory.mktemp("without-store")) as (_, gateway):
        assert _post(gateway, CHAT, PROPER[CHAT]).status_code == 200
        gateway.turns.available = gateway.keys.available = gateway.directory.available = False
        yield gateway


@pytest.fixture(scope="module")
def without_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Without PostgreSQL from the beginning on."""
    with gateway_thread(tmp_path_factory.mktemp("without-keys")) as (_, gateway):
        gateway.turns.available = gateway.keys.available = gateway.directory.available = False
        yield gateway


def _post(gateway: Gateway, path: str, body: object) -> httpx.Response:
    headers = headers_of(path) | {"Authorization": f"Bearer {gateway.key}"}
    return httpx.post(f"{gateway.url}{path}", json=body, headers=headers, timeout=120)


OPERATIONS = (
    ("/v1/chat/completions", "POST"),
    ("/v1/chat/completions/{completion_id}", "GET"),
    ("/v1/completions", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/v1/responses", "POST"),
    ("/v1/responses/input_tokens", "POST"),
    ("/v1/responses/{response_id}", "GET"),
    ("/v1/feedback", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/admin/v1/policies/{policy}/versions/{version}", "GET"),
    ("/admin/v1/policies/{policy}/versions/{version}/compare", "POST"),
    ("/admin/v1/policies/{policy}/events", "GET"),
    ("/admin/v1/policies/{policy}/lessons", "GET"),
    ("/admin/v1/policies/{policy}/lessons", "POST"),
    ("/admin/v1/policies/{policy}/lessons/{lesson}", "DELETE"),
    ("/admin/v1/policies/{policy}/lessons/{lesson}/off", "POST"),
    ("/admin/v1/policies/{policy}/lessons/{lesson}/on", "POST"),
    ("/admin/v1/policies/{policy}/probes", "GET"),
    ("/admin/v1/policies/{policy}/probes", "POST"),
    ("/admin/v1/policies/{policy}/probes/{probe}", "DELETE"),
    ("/admin/v1/keys/{prefix}/limits", "GET"),
    ("/admin/v1/keys/{prefix}/limits", "PUT"),
    ("/admin/v1/export", "GET"),
    ("/v1/feedback", "GET"),
    ("/admin/v1/engines", "GET"),
    ("/admin/v1/engines", "POST"),
    ("/admin/v1/engines/{engine}", "DELETE"),
    ("/admin/v1/engines/{engine}/drain", "POST"),
    ("/admin/v1/keys", "GET"),
    ("/admin/v1/keys", "POST"),
    ("/admin/v1/keys/{prefix}", "DELETE"),
    ("/admin/v1/check", "GET"),
    ("/admin/v1/status", "GET"),
    ("/admin/v1/files/{sha256}", "GET"),
    ("/admin/v1/turns/{turn}", "GET"),
    ("/admin/v1/turns/{turn}/why", "GET"),
    ("/admin/v1/sessions", "GET"),
    ("/admin/v1/sessions/{session_id}", "GET"),
    ("/admin/v1/sessions/{session_id}", "DELETE"),
    ("/admin/v1/turns/{turn}", "DELETE"),
    ("/admin/v1/training", "GET"),
    ("/admin/v1/training/liked", "GET"),
    ("/admin/v1/training/pause", "POST"),
    ("/admin/v1/training/resume", "POST"),
    ("/admin/v1/policies", "GET"),
    ("/admin/v1/policies", "POST"),
    ("/admin/v1/policies/{policy}/versions", "GET"),
    ("/admin/v1/policies/{policy}/retire", "POST"),
    ("/admin/v1/policies/{policy}/roll-back", "POST"),
    ("/admin/v1/policies/{policy}/pin", "POST"),
    ("/admin/v1/policies/{policy}/recipe", "GET"),
    ("/admin/v1/policies/{policy}/recipe", "POST"),
    ("/admin/v1/turns/{turn}/judge", "POST"),
    ("/admin/v1/sessions/{session_id}/judge", "POST"),
    ("/admin/v1/unjudged/judge", "POST"),
    ("/admin/v1/judge/history", "POST"),
    ("/admin/v1/judge/precision", "GET"),
    ("/admin/v1/policies/{policy}/release", "POST"),
    ("/admin/v1/rollouts", "GET"),
    ("/admin/v1/rollouts/start", "POST"),
    ("/admin/v1/rollouts/pause", "POST"),
    ("/admin/v1/rollout-groups", "GET"),
    ("/admin/v1/episodes", "GET"),
    ("/admin/v1/episodes/{episode_id}", "GET"),
    ("/admin/v1/worker/episodes/{episode_id}/key", "POST"),
    ("/admin/v1/worker/artifacts/{digest}", "PUT"),
    ("/admin/v1/worker/artifacts/{digest}", "GET"),
    ("/healthz", "GET"),
    ("/readyz", "GET"),
    ("/metrics", "GET"),
)


def test_every_operation_is_fuzzed(gateway_in_thread: Gateway) -> None:
    described = schemathesis.openapi.from_url(f"{gateway_in_thread.url}/openapi.json")
    operations = {(operation.ok().path, operation.ok().method.upper()) for operation in described.get_all_operations()}
    assert operations == set(OPERATIONS)


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_no_request_makes_a_500(gateway_in_thread: Gateway, path: str, method: str, examples: int) -> None:
    operation = schemathesis.openapi.from_url(f"{gateway_in_thread.url}/openapi.json")[path][method]
    key = gateway_in_thread.admin_key if path.startswith("/admin") else gateway_in_thread.key
    version = headers_of(path)
    known = {**KNOWN_IDS, "model": PROPER[CHAT]["model"]}
    for name, made_by in REPLIES.items():
        known[name] = _post(gateway_in_thread, made_by, PROPER[made_by] | {"store": True}).json()["id"]
    statuses: set[int] = set()

    @given(case=described_requests(operation, known))
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    def check(case: schemathesis.Case) -> None:
        response = case.call(headers={"Authorization": f"Bearer {key}"} | version)
        statuses.add(response.status_code)
        case.validate_response(response, checks=[not_a_server_error])
        if response.status_code < 400:
            case.validate_response(response, checks=[response_schema_conformance])
        if response.status_code >= 400 and path.startswith("/v1"):
            assert set(response.json()["error"]) == error_fields(path)

    check()
    named = re.findall(r"{(\w+)}", path)
    if method == "GET" and named and known.keys() >= set(named):
        assert 200 in statuses


@pytest.mark.parametrize("path", PROPER)
def test_without_an_engine_every_request_is_refused(without_engine: Gateway, path: str) -> None:
    statuses = _fuzz(without_engine, path)
    assert 503 in statuses
    assert 200 not in statuses


@pytest.mark.parametrize("path", PROPER)
def test_without_the_store_a_known_key_is_answered(without_store: Gateway, path: str) -> None:
    assert 200 in _fuzz(without_store, path)


@pytest.mark.parametrize("path", REQUESTS)
def test_without_the_store_an_unknown_key_is_refused(without_keys: Gateway, path: str) -> None:
    statuses = _fuzz(without_keys, path)
    assert 503 in statuses
    assert not statuses & {200, 202}


def _fuzz(gateway: Gateway, path: str) -> set[int]:
    """The statuses of generated requests; checks that each error has its format's shape and is no internal one."""
    operation = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")[path]["POST"]
    statuses: set[int] = set()

    def take(status: int, body: Callable[[], Any]) -> None:
        statuses.add(status)
        assert status in {200, 202, 502, 503, 504} or 400 <= status < 500
        if status >= 400:
            assert set(body()["error"]) == error_fields(path)

    proper = _post(gateway, path, PROPER.get(path, {}))
    take(proper.status_code, proper.json)

    @given(case=described_requests(operation, KNOWN_IDS), body=REQUESTS[path])
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    def check(case: schemathesis.Case, body: object) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "policy"  # else hardly any request would reach the engine
        answer = case.call(headers={"Authorization": f"Bearer {gateway.key}"} | headers_of(path))
        take(answer.status_code, answer.json)
        other = _post(gateway, path, body)
        take(other.status_code, other.json)

    check()
    return statuses
