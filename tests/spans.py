"""Spans that are kept in memory or sent to a collector, and what they say."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from clawloop.core.telemetry.tracing import traced_by


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


class Collector:
    """Takes spans by OTLP over HTTP, on loopback.

    Attributes:
        requests: what arrived, parsed.
    """

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
                assert self.path == "/v1/traces"
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def traces(self, name: str) -> set[str]:
        """The traces of all spans of this name."""
        scopes = (
            scope for request in self.requests for resource in request.resource_spans for scope in resource.scope_spans
        )
        return {one.trace_id.hex() for scope in scopes for one in scope.spans if one.name == name}

    def spans(self) -> dict[str, str]:
        """The service of each span, by name."""
        found: dict[str, str] = {}
        for resource in (resource for request in self.requests for resource in request.resource_spans):
            attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                found |= {one.name: attributes["service.name"] for one in scope.spans}
        return found
