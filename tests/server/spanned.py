"""A worker that keeps its spans, and hands them out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import ReadableSpan

    from server.worker import WorkerContext

Told = tuple[str, int, int, int, bool, dict[str, Any]]
"""A span: its name, trace, parent, id, whether it failed, attributes."""


def keep_spans() -> InMemorySpanExporter:
    """Where this process's spans are from now on."""
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    return kept


def told(span: ReadableSpan) -> Told:
    assert span.context is not None
    parent = 0 if span.parent is None else span.parent.span_id
    failed = span.status.status_code is trace.StatusCode.ERROR
    about = dict(span.attributes or {})
    return span.name, span.context.trace_id, parent, span.context.span_id, failed, about


class Spanned:
    def __init__(self, _: WorkerContext) -> None:
        self._kept = keep_spans()

    def work(self) -> str:
        with trace.get_tracer("user").start_as_current_span("inside"):
            return "done"

    def fail(self) -> None:
        raise ValueError("no")

    def count(self, most: int) -> Iterator[int]:
        yield from range(most)

    def spans(self) -> list[Told]:
        found = [told(span) for span in self._kept.get_finished_spans()]
        self._kept.clear()
        return found
