"""Prometheus gauges: read from the service and its workers when Prometheus asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from prometheus_client import Metric

    from shm_broadcast import MemberStatus
    from shm_broadcast.board.totals import VerbTotal

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
