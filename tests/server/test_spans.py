"""Spans of OpenTelemetry: whose child is whose, across processes; nothing without the package."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from server import spans
from server.config import PACKAGED_NAME
from server.errors import WorkerError
from server.pool import WorkerPool
from tests.commands import run_code
from tests.patience import auntil
from tests.server.fake_service import site
from tests.server.served import ForkedServed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import ReadableSpan

    from server.worker import WorkerContext


Told = tuple[str, int, int, int, bool, dict[str, Any]]
"""A span: its name, trace, parent, id, whether it failed, attributes."""


def keep_spans() -> InMemorySpanExporter:
    """Where this process's spans are from now on."""
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    return kept


def told(span: ReadableSpan) -> Told:
    assert span.context is not None
    parent = 0 if span.parent is None else span.parent.span_id
    failed = span.status.status_code is trace.StatusCode.ERROR
    about = dict(span.attributes or {})
    return span.name, span.context.trace_id, parent, span.context.span_id, failed, about


class Spanned:
    def __init__(self, _: WorkerContext) -> None:
        self._kept = keep_spans()

    def work(self) -> str:
        with trace.get_tracer("user").start_as_current_span("inside"):
            return "done"

    def fail(self) -> None:
        raise ValueError("no")

    def count(self, most: int) -> Iterator[int]:
        yield from range(most)

    def spans(self) -> list[Told]:
        found = [told(span) for span in self._kept.get_finished_spans()]
        self._kept.clear()
        return found


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, SPAN = int(PARENT[3:35], 16), int(PARENT[36:52], 16)
tracer = trace.get_tracer("test")


@pytest.fixture(scope="module")
def process_spans() -> InMemorySpanExporter:
    return keep_spans()


@pytest.fixture
def kept(process_spans: InMemorySpanExporter) -> Iterator[InMemorySpanExporter]:
    process_spans.clear()
    yield process_spans
    process_spans.clear()


def test_a_workers_span_is_a_child_of_the_callers(kept: InMemorySpanExporter) -> None:
    with WorkerPool(Spanned, tp=2) as pool:
        with tracer.start_as_current_span("caller") as caller:
            pool.call("work")
            with pytest.raises(WorkerError):
                pool.call("fail")
            assert list(pool.stream("count", 2)) == [0, 1]
        of = caller.get_span_context()
        for rank, found in enumerate(pool.collective_rpc("spans")):
            by_name = {name: rest for name, *rest in found}
            assert {name for name, *_ in found} == {"work", "inside", "fail", "count"}
            assert {in_trace for _, in_trace, *_ in found} == {of.trace_id}
            _, parent, own, failed, about = by_name["work"]
            assert (parent, failed) == (of.span_id, False)
            assert about == {"group_coordinator.rank": rank, "group_coordinator.generation": 1}
            assert by_name["inside"][1] == own
            assert by_name["fail"][3] is True
        pool.call("work")  # nobody's child: it is not recorded, but what the worker does itself is
        for found in pool.collective_rpc("spans"):
            ((name, _, parent, *_),) = found
            assert (name, parent) == ("inside", 0)


async def test_a_request_its_batch_and_the_callers_context(kept: InMemorySpanExporter) -> None:
    carried: list[Any] = []

    async with site() as here:
        submit = here.pool.submit

        def watched(*args: Any, **options: Any) -> Any:
            carried.append(spans.carried())
            return submit(*args, **options)

        here.pool.submit = watched
        here.client.headers["traceparent"] = PARENT
        here.client.headers["tracestate"] = "vendor=1"
        await here.embed("abc")
        await here.embed([])
        await here.embed("boom")
    found = [told(span) for span in kept.get_finished_spans()]
    assert {in_trace for _, in_trace, *_ in found} == {TRACE}
    requests = [span for span in found if span[0] == "POST /v1/embeddings"]
    batches = [span for span in found if span[0] == "embed batch"]
    assert [about["http.response.status_code"] for *_, about in requests] == [200, 400, 500]
    assert [failed for *_, failed, _ in requests] == [False, False, True]
    assert {parent for _, _, parent, *_ in requests} == {SPAN}
    assert [parent for _, _, parent, *_ in batches] == [requests[0][3], requests[2][3]]
    assert [failed for *_, failed, _ in batches] == [False, True]
    assert batches[0][-1] == {"items": 1, "tokens": 3}
    for sent, batch in zip(carried, batches, strict=True):
        assert sent["traceparent"] == f"00-{TRACE:032x}-{batch[3]:016x}-01"
        assert sent["tracestate"] == "vendor=1"


async def test_requests_that_share_a_batch_are_linked_to_it(kept: InMemorySpanExporter) -> None:
    async with site() as here:
        here.pool.held = []
        asked = [asyncio.create_task(here.embed("x" * n)) for n in range(1, 5)]
        await auntil(lambda: here.service.status()["items_waiting"] == 3)
        here.pool.let_go()
        await asyncio.gather(*asked)
    _, shared = [span for span in kept.get_finished_spans() if span.name == "embed batch"]
    assert shared.parent is not None
    together = [shared.parent.span_id, *(link.context.span_id for link in shared.links)]
    requests = [s for s in kept.get_finished_spans() if s.name == "POST /v1/embeddings"]
    assert len(together) == 3
    assert {*together} < {told(span)[3] for span in requests}


@pytest.mark.parametrize("header", ["", "nonsense", "00-0-0-00", "ff" * 5000])
async def test_a_context_that_is_none_begins_a_trace(
    header: str, kept: InMemorySpanExporter
) -> None:
    async with site() as here:
        here.client.headers["traceparent"] = header
        assert (await here.embed("abc")).status_code == 200
    (request,) = [s for s in kept.get_finished_spans() if s.name == "POST /v1/embeddings"]
    assert request.parent is None


def test_a_service_with_real_workers_writes_one_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "embeddings")
    with ForkedServed("--tp", "2") as served:
        served.wait_until_ready()
        body = {"model": PACKAGED_NAME, "input": "word"}
        url = f"{served.url}/v1/embeddings"
        assert httpx.post(url, json=body, headers={"traceparent": PARENT}).status_code == 200
        served.process.send_signal(signal.SIGTERM)
        out, _ = served.process.communicate(timeout=60)
    found = [span for span in printed(out) if PARENT[3:35] in span["context"]["trace_id"]]
    (request,) = [span for span in found if span["name"] == "POST /v1/embeddings"]
    (batch,) = [span for span in found if span["name"] == "embed batch"]
    calls = [span for span in found if span["name"] == "embed"]
    assert request["parent_id"] == f"0x{PARENT[36:52]}"
    assert batch["parent_id"] == request["context"]["span_id"]
    assert [span["parent_id"] for span in calls] == [batch["context"]["span_id"]] * 2
    ranks = {span["attributes"]["group_coordinator.rank"] for span in calls}
    assert ranks == {0, 1}
    named = {span["resource"]["attributes"]["service.name"] for span in found}
    assert named == {"embeddings"}


def printed(out: str) -> list[dict[str, Any]]:
    """The spans on a service's stdout: objects over several lines, with the ranks before these."""
    lines: dict[str, list[str]] = {}
    for line in out.splitlines():
        label, own = (line[:9], line[9:]) if line.startswith("[rank ") else ("", line)
        lines.setdefault(label, []).append(own)
    found = []
    for own in lines.values():
        text = "\n".join(own)
        while (at := text.find("{")) >= 0:
            span, end = json.JSONDecoder().raw_decode(text, at)
            found.append(span)
            text = text[end:]
    return found


def test_without_the_package_nothing_is_carried() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
from server.calls.pending_call import PendingCall
from server import spans
assert PendingCall("total", (), {}, 1, 0).trace is None
span = spans.begin_request("x", {"traceparent": sys.argv[1]})
with spans.within(span):
    assert span is None and spans.carried() is None
"""
    run_code(code, PARENT)


def test_an_exporter_that_is_not_installed_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nowhere")
    spans.record()
    assert caplog.messages == ["no spans are recorded: no exporter 'nowhere' is installed"]
