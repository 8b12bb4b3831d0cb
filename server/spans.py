"""OpenTelemetry spans, where that is installed: of requests, of batches, of calls in each worker.

The caller's trace context travels with each call, in W3C's form, so a worker's span is a child of
the span in which the call was made. Nothing is recorded before somebody gives OpenTelemetry a
provider, in each process: the caller's own, or that of `record`. Without the package nothing is
carried, and nobody is asked for anything.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

try:
    from opentelemetry import context, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    INSTALLED = False
else:
    INSTALLED = True
    _propagator = TraceContextTextMapPropagator()
    _tracer = trace.get_tracer("group_coordinator")

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from opentelemetry.trace import Span

Carrier: TypeAlias = "dict[str, str]"
"""A trace context: ``traceparent``, and ``tracestate`` if there is one."""

_EXPORTERS = "opentelemetry_traces_exporter"


def carried() -> Carrier | None:
    """The context of the present span; ``None`` if there is none."""
    # A context with nothing in it, which is the rule, is told sooner than one without a span.
    if not INSTALLED or not context.get_current():
        return None
    if not trace.get_current_span().get_span_context().is_valid:
        return None
    carrier: Carrier = {}
    _propagator.inject(carrier)
    return carrier


def begin_request(name: str, headers: Mapping[str, str]) -> Span | None:
    """The span of a request that has come: a child of the one that its headers name; ``None``
    where OpenTelemetry is missing. It ends with `end_request`.
    """
    if not INSTALLED:
        return None
    parent = _propagator.extract(headers)
    return _tracer.start_span(name, parent, kind=trace.SpanKind.SERVER)


def within(span: Span | None) -> AbstractContextManager[Any]:
    """What begins inside is a child of ``span``."""
    if span is None:
        return nullcontext()
    return trace.use_span(span, record_exception=False, set_status_on_exception=False)


def end_request(span: Span | None, status: int) -> None:
    """End the span of a request, which was answered with an HTTP status."""
    if span is not None:
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(trace.StatusCode.ERROR)
        span.end()


def of_batch(
    name: str, carriers: Sequence[Carrier], attributes: Mapping[str, int]
) -> AbstractContextManager[Any]:
    """The span of what is computed for several requests: a child of the first, linked to all.

    Args:
        name: the span's.
        carriers: the requests' contexts; without any, nothing is recorded.
        attributes: the span's.
    """
    if not (INSTALLED and carriers):
        return nullcontext()
    contexts = [_propagator.extract(carrier) for carrier in carriers]
    links = [trace.Link(trace.get_current_span(each).get_span_context()) for each in contexts[1:]]
    return _tracer.start_as_current_span(name, contexts[0], links=links, attributes=attributes)


def of_call(
    method: str, carrier: Carrier, rank: int, generation: int
) -> AbstractContextManager[Any]:
    """The span of a call in a worker."""
    if not INSTALLED:
        return nullcontext()
    about = {"group_coordinator.rank": rank, "group_coordinator.generation": generation}
    return _tracer.start_as_current_span(method, _propagator.extract(carrier), attributes=about)


def check_exporter(name: str) -> None:
    """Raise unless spans can be recorded to the exporter ``name``.

    Raises:
        ImportError: the SDK is not installed.
        ValueError: there is no such exporter; says which there are.
    """
    if not INSTALLED or find_spec("opentelemetry.sdk") is None:
        raise ImportError("install the extra 'otel': no opentelemetry.sdk")
    there = sorted({each.name for each in entry_points(group=_EXPORTERS)})
    if name not in there:
        raise ValueError(
            f"no exporter of spans is called {name!r}; installed are {', '.join(there)}"
        )


def record(exporter: str, **about: str | int) -> None:
    """Record this process's spans, unless it has a provider already.

    What OpenTelemetry's own environment variables say holds: the endpoint, the sampler.

    Args:
        exporter: ``"console"``, or the name of one that is installed, as ``"otlp"``.
        about: attributes of the process, beside its service's name.
    """
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    check_exporter(exporter)
    if isinstance(trace.get_tracer_provider(), TracerProvider):
        return
    (entry, *_) = entry_points(group=_EXPORTERS, name=exporter)
    attributes = {f"group_coordinator.{name}": value for name, value in about.items()}
    named = Resource.create().attributes["service.name"]
    if str(named).startswith("unknown_service"):
        attributes["service.name"] = "group-coordinator"
    provider = TracerProvider(resource=Resource.create(attributes))
    provider.add_span_processor(BatchSpanProcessor(entry.load()()))
    trace.set_tracer_provider(provider)
