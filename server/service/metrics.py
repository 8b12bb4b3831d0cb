"""Count and read what a service exports to Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

    from shm_broadcast import MemberStatus
    from shm_broadcast.state.flight_recorder import VerbTotal


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


STATES = ("starting", "ready", "restarting", "stalled", "failed", "stopping")


@dataclass(frozen=True, slots=True)
class Activity:
    """What a service does: idle if nothing runs, busy if something does, stuck if it is stalled.

    Attributes:
        state: one of `STATES`.
        items_waiting: inputs that wait to be sent to the workers.
        calls_running: batches that the workers have.
        oldest_call_seconds: how long they have had the oldest of these.
        restarts: how often the pool was restarted.
    """

    state: str
    items_waiting: int
    calls_running: int
    oldest_call_seconds: float
    restarts: int


def of_service(now: Activity) -> Iterator[Metric]:
    """The state, what waits and what runs."""
    state = GaugeMetricFamily("service_state", "1 for the one it is in", labels=["state"])
    for each in STATES:
        state.add_metric([each], float(each == now.state))
    yield state
    for name, text, value in (
        ("service_items_waiting", "Items that wait", now.items_waiting),
        ("pool_calls_running", "Batches that the workers have", now.calls_running),
        ("pool_oldest_call_seconds", "Age of the oldest of these", now.oldest_call_seconds),
    ):
        yield GaugeMetricFamily(name, text, value)
    yield CounterMetricFamily("pool_restarts", "Restarts of the pool", now.restarts)


def of_workers(workers: Iterable[MemberStatus]) -> Iterator[Metric]:
    """Each worker's progress: a sample for each rank."""
    age = GaugeMetricFamily(
        "worker_progress_age_seconds", "Time since the last progress", labels=["rank"]
    )
    alive = GaugeMetricFamily("worker_up", "Whether the worker runs", labels=["rank"])
    for worker in workers:
        rank = str(worker.rank)
        alive.add_metric([rank], float(worker.state in ("idle", "busy")))
        if worker.age is not None:
            age.add_metric([rank], worker.age)
    yield age
    yield alive


def of_operations(each: Mapping[int, Sequence[VerbTotal]]) -> Iterator[Metric]:
    """What each worker's group operations and messages came to: a sample for each rank, group and
    verb.
    """
    labels = ("rank", "group", "verb")
    ended, failed, seconds, size = (
        CounterMetricFamily(f"worker_{name}", text, labels=labels)
        for name, text in (
            ("operations", "Operations that have ended; group is empty for queues"),
            ("operation_failures", "Those of them that were not done"),
            ("operation_seconds", "Time from their begin to their end"),
            ("operation_bytes", "Their bytes"),
        )
    )
    for rank, totals in each.items():
        for total in totals:
            of = (str(rank), total.group, total.verb)
            ended.add_metric(of, total.ended)
            failed.add_metric(of, total.failed)
            seconds.add_metric(of, total.seconds)
            size.add_metric(of, total.size)
    yield from (ended, failed, seconds, size)
