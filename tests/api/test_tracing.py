"""Traces of chat requests: which spans there are, what joins them, and that they hold nothing of a conversation."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clawloop.core.contracts.notices import Notice
from clawloop.core.errors import SetupError
from clawloop.core.ids import turn_id_of
from clawloop.core.telemetry.tracing import current_context, span, tracer, tracing
from tests.api.chat_requests import chat_body
from tests.api.conftest import Gateway, running_gateway, until
from tests.fakes.engine import WORDS, fake_engine
from tests.fakes.notifier import FakeNotifier
from tests.spans import Collector, everything_said, kept_spans, named, trace_of

PATH = "/v1/chat/completions"
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRETS = ("zebra crossing", "giraffe", "my-own-request-id", "customer-7", "session of mine", "look_up_animals")


async def post(gateway: Gateway, body: dict[str, Any], **headers: str) -> Any:
    async with gateway.client() as client:
        return await client.post(PATH, json=body, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_call_and_recording_belong_to_the_clients_trace(gateway: Gateway, stream: bool) -> None:
    with kept_spans() as kept:
        answer = await post(gateway, chat_body(stream=stream), traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01")
        await until(lambda: named(kept, "chat"))
    assert answer.status_code == 200
    (chat,), (engine,), (recorded,) = named(kept, "chat"), named(kept, "engine"), named(kept, "record turn")
    assert {trace_of(one) for one in (chat, engine, recorded)} == {TRACE_ID}
    assert chat.parent is not None
    assert f"{chat.parent.span_id:016x}" == SPAN_ID
    own = engine.get_span_context()
    assert own is not None
    assert gateway.engine.traces == [f"00-{TRACE_ID}-{own.span_id:016x}-01"]
    (turn,) = await gateway.recorded()
    stored = await gateway.turns.load(turn.turn_id)
    assert stored is not None
    assert dict(recorded.attributes or {}) == {
        "clawloop.turn": str(turn.turn_id),
        "clawloop.turn_kind": "main",
        "clawloop.status": "complete",
        "clawloop.place": "postgres",
        "clawloop.session": str(stored.session_id),
    }
    said = dict(chat.attributes or {})
    assert (said["clawloop.engine"], said["clawloop.version"], said["clawloop.stream"]) == ("e0", 0, stream)
    assert said["clawloop.response_tokens"] == len(turn.response_ids or ())


async def test_a_request_without_a_trace_begins_one(gateway: Gateway) -> None:
    with kept_spans() as kept:
        await post(gateway, chat_body(), traceparent="not a trace")
        await until(lambda: named(kept, "chat"))
    (chat,), (engine,) = named(kept, "chat"), named(kept, "engine")
    assert chat.parent is None
    assert trace_of(engine) == trace_of(chat)
    assert str(gateway.engine.traces[0]).split("-")[1] == trace_of(chat)


@pytest.mark.parametrize("end", ["well", "OVERFLOW", "FAIL500", "HTML", "GARBAGE"])
async def test_no_span_holds_anything_of_a_conversation(gateway: Gateway, end: str) -> None:
    messages = [
        {"role": "system", "content": "You know the giraffe."},
        {"role": "user", "content": f"About the zebra crossing: {end}"},
    ]
    tool = {"type": "function", "function": {"name": "look_up_animals", "parameters": {"type": "object"}}}
    named_by = {"session_id": "session of mine", "user": "customer-7"}
    for stream in (False, True):
        with kept_spans() as kept:
            body = chat_body(messages=messages, stream=stream, tools=[tool], **named_by)
            await post(gateway, body, **{"X-Request-Id": "my-own-request-id"})
            await until(partial(named, kept, "chat"))
        said = everything_said(kept)
        assert named(kept, "engine")
        for secret in (*SECRETS, *(word.strip() for word in WORDS if len(word.strip()) > 1), "maximum context length"):
            assert secret not in said, secret


async def test_an_error_is_named_by_its_type_alone() -> None:
    with kept_spans() as kept:
        with pytest.raises(ValueError, match="zebra"), span("work"):
            raise ValueError("zebra crossing")
    (work,) = named(kept, "work")
    assert (work.status.description, work.events) == ("ValueError", ())


async def test_the_workflows_signal_belongs_to_the_trace(tmp_path: Path) -> None:
    class SpanningNotifier(FakeNotifier):
        async def notify(self, notice: Notice) -> None:
            with span("signal"):
                await super().notify(notice)

    notifier = SpanningNotifier()
    with kept_spans() as kept:
        async with fake_engine() as engine, running_gateway(tmp_path, engines=[engine], notifier=notifier) as gateway:
            answers = [(await post(gateway, chat_body(session_id=name))).json()["id"] for name in ("one", "two")]
            await until(lambda: len(named(kept, "signal")) == 2)
    by_turn = {dict(chat.attributes or {})["clawloop.turn"]: trace_of(chat) for chat in named(kept, "chat")}
    assert {by_turn[str(turn_id_of(answer))] for answer in answers} == {trace_of(one) for one in named(kept, "signal")}
    assert len(set(by_turn.values())) == 2


async def test_while_tracing_is_off_nothing_is_made_and_the_clients_trace_goes_on(gateway: Gateway) -> None:
    await post(gateway, chat_body(), traceparent=f"00-{TRACE_ID}-{SPAN_ID}-00")
    assert gateway.engine.traces == [f"00-{TRACE_ID}-{SPAN_ID}-00"]
    assert current_context() is None
    with span("work", turn="x") as traced:
        assert traced.headers() == {}


async def test_simultaneous_requests_have_traces_of_their_own(gateway: Gateway) -> None:
    with kept_spans() as kept:
        await asyncio.gather(*(post(gateway, chat_body()) for _ in range(8)))
        await until(lambda: len(named(kept, "chat")) == 8)
    traces = {trace_of(chat) for chat in named(kept, "chat")}
    assert len(traces) == 8
    assert {trace_of(one) for one in named(kept, "record turn")} == traces


@pytest.mark.parametrize(("name", "service"), [(None, "clawloop-gateway"), ("mine", "mine")])
async def test_spans_reach_a_collector(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, name: str | None, service: str
) -> None:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        if name is not None:
            monkeypatch.setenv("OTEL_SERVICE_NAME", name)
        with tracing("clawloop-gateway"):
            await post(gateway, chat_body())
            await until(lambda: {"chat", "engine", "record turn"} <= collector.spans().keys())
            with span("last"):
                pass
        await until(lambda: "last" in collector.spans())
    assert set(collector.spans().values()) == {service}


async def test_the_spans_of_a_process_that_fails_reach_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")  # by itself it sends none
        with pytest.raises(SetupError, match="on purpose"), tracing("clawloop-test"), span("last"):
            raise SetupError("on purpose")
        await until(lambda: "last" in collector.spans())
    assert tracer() is None


@pytest.mark.parametrize(
    ("environment", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_standard_variables_turn_traces_on(environment: dict[str, str], on: bool) -> None:
    with tracing("clawloop-test", environment):
        assert (tracer() is not None) is on
    assert tracer() is None


@pytest.mark.parametrize(
    "variable",
    [{"OTEL_TRACES_EXPORTER": "console"}, {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}],
)
def test_what_traces_cannot_leave_by_is_refused(variable: dict[str, str]) -> None:
    with pytest.raises(SetupError, match=f"^{list(variable)[-1]}: "), tracing("clawloop-test", variable):
        pass
