"""OpenTelemetry spans of requests, of batches, and of calls in each worker.

Each call carries the caller's trace context (W3C), so a worker's span is a child of the caller's.
A process records spans only with a provider: the program's own, or that of `record`. OpenTelemetry
is optional, and imported only if the program has imported it, or a request has a trace context.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_log = logging.getLogger(__name__)

Carrier: TypeAlias = "dict[str, str]"
"""A trace context: ``traceparent``, and ``tracestate`` if there is one."""


class _Api(NamedTuple):
    context: Any
    trace: Any
    use_span: Callable[..., AbstractContextManager[Any]]
    propagator: Any
    tracer: Tracer


@cache
def _api() -> _Api | None:
    try:
        from opentelemetry import context, trace  # noqa: PLC0415
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415
    except ImportError:
        return None
    propagator = tracecontext.TraceContextTextMapPropagator()
    tracer = trace.get_tracer("group_coordinator")
    return _Api(context, trace, trace.use_span, propagator, tracer)


def _api_in_use() -> _Api | None:
    # If the program has not imported it, it records no span.
    return _api() if sys.modules.get("opentelemetry.trace") else None


def carried() -> Carrier | None:
    """Return the context of the current span; ``None`` if there is none."""
    api = _api_in_use()
    # An empty context is the common case, and faster to detect than one without a span.
    if api is None or not api.context.get_current():
        return None
    if not api.trace.get_current_span().get_span_context().is_valid:
        return None
    carrier: Carrier = {}
    api.propagator.inject(carrier)
    return carrier


def begin_request(name: str, headers: Mapping[str, str]) -> Span | None:
    """Start the span of a request, a child of the span in its headers.

    ``None`` if OpenTelemetry is missing, or neither imported nor in the headers. Finish it with
    `end_request`.
    """
    api = _api() if "traceparent" in headers else _api_in_use()
    if api is None:
        return None
    return api.tracer.start_span(
        name, api.propagator.extract(headers), kind=api.trace.SpanKind.SERVER
    )


def within(span: Span | None) -> AbstractContextManager[Any]:
    """Make ``span`` the parent of spans started in the block."""
    api = None if span is None else _api()
    if api is None:
        return nullcontext()
    return api.use_span(span, record_exception=False, set_status_on_exception=False)


def end_request(span: Span | None, status: int) -> None:
    """End the span of a request with its HTTP status."""
    api = None if span is None else _api()
    if span is not None and api is not None:
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(api.trace.StatusCode.ERROR)
        span.end()


def of_batch(
    name: str, carriers: Sequence[Carrier], attributes: Mapping[str, int]
) -> AbstractContextManager[Any]:
    """Start the span of a batch: a child of the first request's, linked to all.

    Args:
        name: the span's name.
        carriers: the requests' contexts; empty: nothing is recorded.
        attributes: the span's attributes.
    """
    api = _api() if carriers else None
    if api is None:
        return nullcontext()
    contexts = [api.propagator.extract(carrier) for carrier in carriers]
    others = [api.trace.get_current_span(each).get_span_context() for each in contexts[1:]]
    links = [api.trace.Link(each) for each in others]
    return api.tracer.start_as_current_span(name, contexts[0], links=links, attributes=attributes)


def of_call(
    method: str, carrier: Carrier, rank: int, generation: int
) -> AbstractContextManager[Any]:
    """Start the span of a call in a worker."""
    api = _api()
    if api is None:
        return nullcontext()
    attributes = {"group_coordinator.rank": rank, "group_coordinator.generation": generation}
    return api.tracer.start_as_current_span(
        method, api.propagator.extract(carrier), attributes=attributes
    )


def record() -> None:
    """Record this process's spans to ``OTEL_TRACES_EXPORTER``, unless it has a provider already.

    OpenTelemetry's other environment variables apply, as for the endpoint and the sampler.
    """
    exporter = os.environ.get("OTEL_TRACES_EXPORTER") or "none"
    if exporter == "none":
        return
    from importlib.metadata import entry_points  # noqa: PLC0415 - loads the parser of e-mails

    entries = entry_points(group="opentelemetry_traces_exporter", name=exporter)
    if not entries:
        _log.warning("no spans are recorded: no exporter %r is installed", exporter)
        return
    from opentelemetry import trace  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(next(iter(entries)).load()()))
        trace.set_tracer_provider(provider)
