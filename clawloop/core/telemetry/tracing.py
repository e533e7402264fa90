"""OpenTelemetry traces of requests: ids, numbers and types of errors, never anything that a client or a model wrote.

Off unless the standard variables name a collector; then the SDK is loaded, and spans leave in the background.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias

from clawloop.core.errors import SetupError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

Value: TypeAlias = str | int | float | bool | None
Kind: TypeAlias = Literal["internal", "server", "client"]

# A process must not wait for a collector that is away; what is not sent by then is lost.
_FLUSH_SECONDS = 1.0
_PROTOCOL = "http/protobuf"

_tracer: Tracer | None = None


class TracedSpan:
    """A span, or nothing while tracing is off."""

    def __init__(self, span: Span | None = None) -> None:
        self._span = span

    def set(self, **attributes: Value) -> None:
        """Add attributes: ids and numbers. None is left out."""
        if self._span is None:
            return
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(f"clawloop.{name}", value)

    def headers(self) -> dict[str, str]:
        """The headers by which another server's spans become children of this one; empty while tracing is off."""
        if self._span is None:
            return {}
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(self._span))
        return carrier


_NOTHING = TracedSpan()


@contextmanager
def span(
    name: str, kind: Kind = "internal", parent: Mapping[str, str] | None = None, **attributes: Value
) -> Iterator[TracedSpan]:
    """A span for the time of the block. Of an error only the type is recorded: its message may quote a conversation.

    Args:
        parent: valid W3C trace headers of the caller; empty or None: the current span of this task.
    """
    if _tracer is None:
        yield _NOTHING
        return
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(parent) if parent else None
    with _tracer.start_as_current_span(
        name, context, SpanKind[kind.upper()], record_exception=False, set_status_on_exception=False
    ) as started:
        traced = TracedSpan(started)
        traced.set(**attributes)
        try:
            yield traced
        except BaseException as error:
            started.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise


def current_context() -> Context | None:
    """The place in a trace where later work of another task belongs; None while tracing is off."""
    if _tracer is None:
        return None
    from opentelemetry.context import get_current

    return get_current()


@contextmanager
def continued(context: Context | None) -> Iterator[None]:
    """Spans of the block belong where `current_context` was called."""
    if context is None:
        yield
        return
    from opentelemetry.context import attach, detach

    token = attach(context)
    try:
        yield
    finally:
        detach(token)


def tracer() -> Tracer | None:
    """The tracer of this process; None while tracing is off."""
    return _tracer


@contextmanager
def tracing(service: str, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Export this process's spans during the block, if the environment names a collector.

    Args:
        service: the process's name, unless `OTEL_SERVICE_NAME` is set.

    Raises:
        SetupError: a variable asks for an exporter or protocol that is not there.
    """
    if not _is_wanted(environment):
        yield
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        with traced_by(provider):
            yield
    finally:
        # In a thread of its own, because the exporter goes on trying for longer than a process may take to stop.
        closing = threading.Thread(target=provider.shutdown, daemon=True)
        closing.start()
        closing.join(_FLUSH_SECONDS)


@contextmanager
def traced_by(provider: TracerProvider) -> Iterator[None]:
    """Give all spans of this process to the provider during the block."""
    global _tracer
    _tracer = provider.get_tracer("clawloop")
    try:
        yield
    finally:
        _tracer = None


def _is_wanted(environment: Mapping[str, str]) -> bool:
    def given(name: str) -> str:
        return environment.get(name, "").strip().lower()

    exporter = given("OTEL_TRACES_EXPORTER")
    if given("OTEL_SDK_DISABLED") == "true" or exporter == "none":
        return False
    endpoint = given("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or given("OTEL_EXPORTER_OTLP_ENDPOINT")
    if exporter not in ("", "otlp"):
        raise SetupError("OTEL_TRACES_EXPORTER: use `otlp`, or `none` for no traces")
    protocol = given("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or given("OTEL_EXPORTER_OTLP_PROTOCOL")
    if not (exporter or endpoint):
        return False
    if protocol not in ("", _PROTOCOL):
        raise SetupError(f"OTEL_EXPORTER_OTLP_PROTOCOL: traces are exported by {_PROTOCOL} only")
    return True
