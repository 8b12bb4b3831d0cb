"""Count the events of a service, and export metrics to Prometheus."""

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

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_NEXT_TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_COMPLETION_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """Counters of one service; see their help texts.

    Status 499 means that the client disconnected. ``now`` returns further metrics for each export;
    ``kind`` names the service; ``seconds`` are the buckets of its requests' durations.
    """

    def __init__(
        self,
        now: Callable[[], Iterable[Metric]],
        kind: str,
        seconds: Sequence[float] = _SECONDS,
    ) -> None:
        # Timestamps of creation would double the number of series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry(target_info={"kind": kind})
        self.requests = Counter(
            "service_requests", "Requests by HTTP status", ["status"], registry=registry
        )
        self.errors = Counter(
            "service_errors", "Requests not answered with 200", ["code"], registry=registry
        )
        self.seconds = Histogram(
            "service_request_seconds",
            "Time of requests answered with 200",
            buckets=seconds,
            registry=registry,
        )
        self.inputs = Counter(
            "service_inputs", "Inputs of requests answered with 200", registry=registry
        )
        self.tokens = Counter(
            "service_tokens", "Tokens of requests answered with 200", registry=registry
        )
        self.truncated = Counter(
            "service_inputs_truncated", "Inputs that were cut", registry=registry
        )
        self.calls = Counter("pool_calls", "Batches computed", ["outcome"], registry=registry)
        self.call_errors = Counter(
            "pool_call_errors", "Batches that failed", ["kind"], registry=registry
        )
        self.call_seconds = Histogram(
            "pool_call_seconds", "Time of a batch", ["outcome"], buckets=_SECONDS, registry=registry
        )
        self.batch_items = Histogram(
            "pool_batch_items", "Items of a batch", buckets=_SIZES, registry=registry
        )
        self.batch_tokens = Histogram(
            "pool_batch_tokens", "Tokens of a batch", buckets=_TOKENS, registry=registry
        )
        registry.register(_Now(now))

    def totals(self) -> dict[str, Any]:
        """Return answers, inputs, tokens and latencies since the start, as plain data.

        Latencies are pairs of a limit in seconds, ``"+Inf"`` last, and the number of requests
        within it.
        """
        return {
            "requests": {each.labels["status"]: each.value for each in _totals(self.requests)},
            "calls": {each.labels["outcome"]: each.value for each in _totals(self.calls)},
            "inputs": _totals(self.inputs)[0].value,
            "tokens": _totals(self.tokens)[0].value,
            "latencies": _buckets(self.seconds),
        }

    def expose(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class CompletionMetrics(Metrics):
    """Counters of a completion service, and of its tokens; a `TokenObserver`.

    Names without their prefix, buckets and the label ``model_name`` are vLLM's.
    """

    def __init__(self, now: Callable[[], Iterable[Metric]], model_name: str) -> None:
        super().__init__(now, "completion", _COMPLETION_SECONDS)
        self._model_name = model_name
        labels: Any = {"labelnames": ["model_name"], "registry": self._registry}
        self._first_token = Histogram(
            "llm_time_to_first_token_seconds",
            "Time from the request to its first token",
            buckets=_FIRST_TOKEN_SECONDS,
            **labels,
        )
        self._next_token = Histogram(
            "llm_inter_token_latency_seconds",
            "Time between two tokens of an answer",
            buckets=_NEXT_TOKEN_SECONDS,
            **labels,
        )
        self._prompt = Counter("llm_prompt_tokens", "Tokens of computed prompts", **labels)
        self._generated = Counter("llm_generation_tokens", "Tokens of answers", **labels)
        self._success = Counter(
            "llm_request_success",
            "Answers that are complete",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        for metric in (self._first_token, self._next_token, self._prompt, self._generated):
            metric.labels(model_name)  # exported from the beginning

    def prompt(self, tokens: int) -> None:
        """See `TokenObserver`."""
        self._prompt.labels(self._model_name).inc(tokens)

    def token(self, seconds: float, *, first: bool) -> None:
        """See `TokenObserver`."""
        times = self._first_token if first else self._next_token
        times.labels(self._model_name).observe(seconds)
        self._generated.labels(self._model_name).inc()

    def finished(self, reason: str) -> None:
        """Count a complete answer, which ended for ``reason``, ``"stop"`` or ``"length"``."""
        self._success.labels(self._model_name, reason).inc()

    def of_engine(self, running: int, waiting: int, cache_usage: float) -> Iterator[Metric]:
        """Yield the engine's load."""
        for name, text, value in (
            ("llm_num_requests_running", "Requests that have a slot", running),
            ("llm_num_requests_waiting", "Requests that wait for a slot", waiting),
            ("llm_kv_cache_usage_perc", "Share of the KV cache in use; 1 is all", cache_usage),
        ):
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family

    def totals(self) -> dict[str, Any]:
        """Return also the tokens, and the times to the first and between others."""
        return super().totals() | {
            "prompt_tokens": _totals(self._prompt)[0].value,
            "generation_tokens": _totals(self._generated)[0].value,
            "first_token": _buckets(self._first_token),
            "inter_token": _buckets(self._next_token),
        }


class _Now(Collector):
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


def _samples(metric: Counter | Histogram, suffix: str) -> list[Sample]:
    samples = [sample for family in metric.collect() for sample in family.samples]
    return [sample for sample in samples if sample.name.endswith(suffix)]


def _buckets(histogram: Histogram) -> list[list[Any]]:
    return [[each.labels["le"], each.value] for each in _samples(histogram, "_bucket")]


def _totals(counter: Counter) -> list[Sample]:
    return _samples(counter, "_total")


STATES = ("starting", "ready", "restarting", "stalled", "failed", "stopping")


@dataclass(frozen=True, slots=True)
class Activity:
    """State, one of `STATES`, and load; the pool's calls are batches of items."""

    state: str
    items_waiting: int
    calls_running: int
    oldest_call_seconds: float
    restarts: int


def of_service(now: Activity) -> Iterator[Metric]:
    """Yield the metrics of state and load."""
    state = GaugeMetricFamily("service_state", "1 for the current state", labels=["state"])
    for each in STATES:
        state.add_metric([each], float(each == now.state))
    yield state
    for name, text, value in (
        ("service_items_waiting", "Items that wait", now.items_waiting),
        ("pool_calls_running", "Batches that the workers have", now.calls_running),
        ("pool_oldest_call_seconds", "Age of the oldest running batch", now.oldest_call_seconds),
    ):
        yield GaugeMetricFamily(name, text, value)
    yield CounterMetricFamily("pool_restarts", "Restarts of the pool", now.restarts)


def of_workers(workers: Iterable[MemberStatus]) -> Iterator[Metric]:
    """Yield each worker's liveness and progress, a sample per rank."""
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
    """Yield the totals of group operations, a sample per rank, group and verb."""
    labels = ("rank", "group", "verb")
    ended, failed, seconds, size = (
        CounterMetricFamily(f"worker_{name}", text, labels=labels)
        for name, text in (
            ("operations", "Operations that have ended; group is empty for queues"),
            ("operation_failures", "Operations that failed"),
            ("operation_seconds", "Time of ended operations, including waits"),
            ("operation_bytes", "Bytes of ended operations"),
        )
    )
    for rank, totals in each.items():
        for total in totals:
            values = (str(rank), total.group, total.verb)
            ended.add_metric(values, total.ended)
            failed.add_metric(values, total.failed)
            seconds.add_metric(values, total.seconds)
            size.add_metric(values, total.size)
    yield from (ended, failed, seconds, size)
