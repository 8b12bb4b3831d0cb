"""OpenTelemetry spans, where it is installed: of requests, of batches, of calls in each worker.

The caller's trace context travels with each call, in W3C's form, so a worker's span is a child of
the span in which the call was made. A process records nothing until OpenTelemetry has a provider
there: the caller's own, or that of `record`. If the package is not installed, no context is
carried. The package is imported only if the program already uses it, or a request brings a trace
context.
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
    """What is used of OpenTelemetry's API."""

    context: Any
    trace: Any
    use_span: Callable[..., AbstractContextManager[Any]]
    propagator: Any
    tracer: Tracer


@cache
def _api() -> _Api | None:
    """Import it; ``None`` where it is not installed."""
    try:
        from opentelemetry import context, trace  # noqa: PLC0415
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415
    except ImportError:
        return None
    propagator = tracecontext.TraceContextTextMapPropagator()
    tracer = trace.get_tracer("group_coordinator")
    return _Api(context, trace, trace.use_span, propagator, tracer)


def _api_in_use() -> _Api | None:
    """As `_api`, if anybody has imported it: else there is no span, and nobody records one."""
    return _api() if sys.modules.get("opentelemetry.trace") else None


def carried() -> Carrier | None:
    """The context of the present span; ``None`` if there is none."""
    api = _api_in_use()
    # A context with nothing in it, which is the rule, is told sooner than one without a span.
    if api is None or not api.context.get_current():
        return None
    if not api.trace.get_current_span().get_span_context().is_valid:
        return None
    carrier: Carrier = {}
    api.propagator.inject(carrier)
    return carrier


def begin_request(name: str, headers: Mapping[str, str]) -> Span | None:
    """The span of a request that has come: a child of the one that its headers name; ``None``
    where OpenTelemetry is missing, or neither used nor asked for. It ends with `end_request`.
    """
    api = _api() if "traceparent" in headers else _api_in_use()
    if api is None:
        return None
    return api.tracer.start_span(
        name, api.propagator.extract(headers), kind=api.trace.SpanKind.SERVER
    )


def within(span: Span | None) -> AbstractContextManager[Any]:
    """What begins inside is a child of ``span``."""
    api = None if span is None else _api()
    if api is None:
        return nullcontext()
    return api.use_span(span, record_exception=False, set_status_on_exception=False)


def end_request(span: Span | None, status: int) -> None:
    """End the span of a request, which was answered with an HTTP status."""
    api = None if span is None else _api()
    if span is not None and api is not None:
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(api.trace.StatusCode.ERROR)
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
    """The span of a call in a worker."""
    api = _api()
    if api is None:
        return nullcontext()
    about = {"group_coordinator.rank": rank, "group_coordinator.generation": generation}
    return api.tracer.start_as_current_span(
        method, api.propagator.extract(carrier), attributes=about
    )


def check_exporter(name: str) -> None:
    """Raise unless spans can be recorded to the exporter ``name``.

    Raises:
        ImportError: the SDK is not installed.
        ValueError: there is no such exporter; says which there are.
    """
    if _api() is None or find_spec("opentelemetry.sdk") is None:
        raise ImportError("install the extra 'otel': no opentelemetry.sdk")
    there = sorted({each.name for each in _exporters()})
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
