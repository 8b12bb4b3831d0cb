"""What the service counts, for Prometheus. Each service has a registry of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shm_broadcast import MemberStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counters of one service.

    Attributes:
        requests: embeddings requests answered, by HTTP status.
        seconds: how long those took that were answered with 200.
        calls: batches that the workers computed, by outcome, ``"ok"`` or ``"error"``.
        batch_items: items of those batches.

    Args:
        waiting: how many items wait.
        workers: what every worker was last seen doing; empty while there are none.
    """

    def __init__(
        self, waiting: Callable[[], int], workers: Callable[[], Sequence[MemberStatus]]
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
        Gauge("embedding_items_waiting", "Items that wait", registry=self._registry).set_function(
            waiting
        )
        self._registry.register(_Workers(workers))

    def expose(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)


class _Workers(Collector):
    """Each worker's progress, read from the board when asked."""

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
