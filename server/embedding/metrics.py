"""What the service counts, for Prometheus. Each service has a registry of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client import Metric
    from prometheus_client.samples import Sample

    from shm_broadcast import MemberStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
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


class Metrics:
    """Counters of one service.

    Attributes:
        requests: embeddings requests answered, by HTTP status.
        seconds: how long those took that were answered with 200.
        calls: batches that the workers computed, by outcome, ``"ok"`` or ``"error"``.
        batch_items: items of those batches.
        batch_tokens: tokens of those batches.
        truncated: inputs that were cut.

    Args:
        activity: what the service does.
        workers: what every worker was last seen doing; empty while there are none.
    """

    def __init__(
        self, activity: Callable[[], Activity], workers: Callable[[], Sequence[MemberStatus]]
    ) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "embedding_requests", "Requests answered", ["status"], registry=self._registry
        )
        self.seconds = Histogram(
            "embedding_request_seconds",
            "Time of requests answered with 200",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.calls = Counter("pool_calls", "Batches computed", ["outcome"], registry=self._registry)
        self.batch_items = Histogram(
            "pool_batch_items", "Items of a batch", buckets=_SIZES, registry=self._registry
        )
        self.batch_tokens = Histogram(
            "pool_batch_tokens", "Tokens of a batch", buckets=_TOKENS, registry=self._registry
        )
        self.truncated = Counter(
            "embedding_inputs_truncated", "Inputs that were cut", registry=self._registry
        )
        self._registry.register(_Now(activity))
        self._registry.register(_Workers(workers))

    def totals(self) -> dict[str, Any]:
        """What was counted since the start, as plain data: answers, items, tokens, and latencies.

        Of latencies: for each limit in seconds how many requests took no longer; all of them are
        under ``"+Inf"``.
        """
        return {
            "requests": {each.labels["status"]: each.value for each in _totals(self.requests)},
            "calls": {each.labels["outcome"]: each.value for each in _totals(self.calls)},
            "items": _sum(self.batch_items),
            "tokens": _sum(self.batch_tokens),
            "seconds": _sum(self.seconds),
            "latencies": [
                [each.labels["le"], each.value] for each in _samples(self.seconds, "_bucket")
            ],
        }

    def expose(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _samples(metric: Counter | Histogram, suffix: str) -> list[Sample]:
    found = [sample for family in metric.collect() for sample in family.samples]
    return [sample for sample in found if sample.name.endswith(suffix)]


def _totals(counter: Counter) -> list[Sample]:
    return _samples(counter, "_total")


def _sum(histogram: Histogram) -> float:
    return sum(sample.value for sample in _samples(histogram, "_sum"))


class _Now(Collector):
    """The service's activity, read whenever the metrics are."""

    def __init__(self, activity: Callable[[], Activity]) -> None:
        self._activity = activity

    def collect(self) -> Iterable[Metric]:
        now = self._activity()
        state = GaugeMetricFamily("service_state", "1 for the one it is in", labels=["state"])
        for each in STATES:
            state.add_metric([each], float(each == now.state))
        yield state
        for name, text, value in (
            ("embedding_items_waiting", "Items that wait", now.items_waiting),
            ("pool_calls_running", "Batches that the workers have", now.calls_running),
            ("pool_oldest_call_seconds", "Age of the oldest of these", now.oldest_call_seconds),
        ):
            yield GaugeMetricFamily(name, text, value)
        yield CounterMetricFamily("pool_restarts", "Restarts of the pool", now.restarts)


class _Workers(Collector):
    """Each worker's progress, read from the board whenever the metrics are."""

    def __init__(self, workers: Callable[[], Sequence[MemberStatus]]) -> None:
        self._workers = workers

    def collect(self) -> Iterable[GaugeMetricFamily]:
        age = GaugeMetricFamily(
            "worker_progress_age_seconds", "Time since the last progress", labels=["rank"]
        )
        alive = GaugeMetricFamily("worker_up", "Whether the worker runs", labels=["rank"])
        for worker in self._workers():
            rank = str(worker.rank)
            alive.add_metric([rank], float(worker.state in ("idle", "busy")))
            if worker.age is not None:
                age.add_metric([rank], worker.age)
        yield age
        yield alive
