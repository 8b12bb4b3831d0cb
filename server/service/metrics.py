"""What the service counts, for Prometheus. Each service has a registry of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import Metric
    from prometheus_client.samples import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """Counters of one service.

    Attributes:
        requests: requests answered, by HTTP status; 499: the client had left.
        errors: those that were not answered with 200, by the error's code.
        seconds: how long those took that were answered with 200.
        inputs: their inputs.
        tokens: their tokens.
        truncated: inputs that were cut.
        calls: batches that the workers computed, by outcome, ``"ok"`` or ``"error"``.
        call_errors: those that failed, by the class of the error.
        call_seconds: how long they took, by outcome.
        batch_items: items of those batches.
        batch_tokens: tokens of those batches.
        refusals: connections that were closed with an error before there was a request, by status.

    Args:
        now: gives further metrics, whenever all are read.
        kind: what requests are answered with.
    """

    def __init__(self, now: Callable[[], Iterable[Metric]], kind: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each
        self._registry = of = CollectorRegistry(target_info={"kind": kind})
        self.requests = Counter("service_requests", "Requests answered", ["status"], registry=of)
        self.errors = Counter(
            "service_errors", "Requests not answered with 200", ["code"], registry=of
        )
        self.seconds = Histogram(
            "service_request_seconds",
            "Time of requests answered with 200",
            buckets=_SECONDS,
            registry=of,
        )
        self.inputs = Counter("service_inputs", "Inputs of those", registry=of)
        self.tokens = Counter("service_tokens", "Tokens of those", registry=of)
        self.truncated = Counter("service_inputs_truncated", "Inputs that were cut", registry=of)
        self.calls = Counter("pool_calls", "Batches computed", ["outcome"], registry=of)
        self.call_errors = Counter("pool_call_errors", "Batches that failed", ["kind"], registry=of)
        self.call_seconds = Histogram(
            "pool_call_seconds", "Time of a batch", ["outcome"], buckets=_SECONDS, registry=of
        )
        self.batch_items = Histogram(
            "pool_batch_items", "Items of a batch", buckets=_SIZES, registry=of
        )
        self.batch_tokens = Histogram(
            "pool_batch_tokens", "Tokens of a batch", buckets=_TOKENS, registry=of
        )
        self.refusals = Counter(
            "connections_refused", "Connections closed without a request", ["status"], registry=of
        )
        of.register(_Now(now))

    def fail(self, status: int, code: str) -> None:
        """Count a request that was answered with an error."""
        self.requests.labels(str(status)).inc()
        self.errors.labels(code).inc()

    def refuse(self, status: int) -> None:
        """Count a connection that was closed with an error before there was a request."""
        self.refusals.labels(str(status)).inc()

    def totals(self) -> dict[str, Any]:
        """What was counted since the start, as plain data: answers, inputs, tokens, and latencies.

        Of latencies: for each limit in seconds how many requests took no longer; all of them are
        under ``"+Inf"``.
        """
        return {
            "requests": {each.labels["status"]: each.value for each in _totals(self.requests)},
            "calls": {each.labels["outcome"]: each.value for each in _totals(self.calls)},
            "inputs": _totals(self.inputs)[0].value,
            "tokens": _totals(self.tokens)[0].value,
            "latencies": [
                [each.labels["le"], each.value] for each in _samples(self.seconds, "_bucket")
            ],
        }

    def expose(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Now(Collector):
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


def _samples(metric: Counter | Histogram, suffix: str) -> list[Sample]:
    found = [sample for family in metric.collect() for sample in family.samples]
    return [sample for sample in found if sample.name.endswith(suffix)]


def _totals(counter: Counter) -> list[Sample]:
    return _samples(counter, "_total")
