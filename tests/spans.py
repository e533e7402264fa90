"""Spans that are kept in memory, and what they say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from clawloop.telemetry.tracing import traced_by


@contextmanager
def kept_spans() -> Iterator[InMemorySpanExporter]:
    """Tracing is on during the block."""
    kept, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    with traced_by(provider):
        yield kept
    provider.shutdown()


def named(kept: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in kept.get_finished_spans() if span.name == name]


def trace_of(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"{context.trace_id:032x}"


def everything_said(kept: InMemorySpanExporter) -> str:
    """Names, attributes, events and statuses of all spans."""
    return "\n".join(
        json.dumps(
            [
                span.name,
                dict(span.attributes or {}),
                span.status.description,
                [[event.name, dict(event.attributes or {})] for event in span.events],
                [dict(link.attributes or {}) for link in span.links],
            ],
            ensure_ascii=False,
        )
        for span in kept.get_finished_spans()
    )
