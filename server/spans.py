"""OpenTelemetry spans of requests, of batches, and of calls in each worker.

Each call carries the caller's trace context (W3C), so a worker's span is a child of the caller's.
A process records spans only with a provider: the program's own, or that of `record`. OpenTelemetry
is optional, and imported only if the program has imported it, or a request has a trace context.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

    from opentelemetry.trace import Span, Tracer

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


def check_exporter(name: str) -> None:
    """Raise unless spans can be recorded to the exporter ``name``.

    Raises:
        ImportError: the SDK is not installed.
        ValueError: the exporter is not installed; lists those that are.
    """
    if _api() is None or find_spec("opentelemetry.sdk") is None:
        raise ImportError("install the extra 'otel': no opentelemetry.sdk")
    installed = sorted({each.name for each in _exporters()})
    if name not in installed:
        raise ValueError(
            f"no exporter of spans is called {name!r}; installed are {', '.join(installed)}"
        )


def record(exporter: str, **about: str | int) -> None:
    """Record this process's spans, unless it has a provider already.

    OpenTelemetry's environment variables apply, as for the endpoint and the sampler.

    Args:
        exporter: ``"console"``, or the name of an installed exporter, such as ``"otlp"``.
        about: attributes of the process, beside its service's name.
    """
    from opentelemetry import trace  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    check_exporter(exporter)
    if isinstance(trace.get_tracer_provider(), TracerProvider):
        return
    (entry, *_) = (each for each in _exporters() if each.name == exporter)
    attributes = {f"group_coordinator.{name}": value for name, value in about.items()}
    named = Resource.create().attributes["service.name"]
    if str(named).startswith("unknown_service"):
        attributes["service.name"] = "group-coordinator"
    provider = TracerProvider(resource=Resource.create(attributes))
    provider.add_span_processor(BatchSpanProcessor(entry.load()()))
    trace.set_tracer_provider(provider)


def _exporters() -> EntryPoints:
    from importlib.metadata import entry_points  # noqa: PLC0415 - loads the parser of e-mails

    return entry_points(group="opentelemetry_traces_exporter")
