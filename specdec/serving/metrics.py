"""The metrics of a server, for Prometheus."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from specdec.serving.driver import EngineDriver, Piece
from specdec.serving.engine_gauges import EngineGauges
from specdec.serving.generation import Generation
from specdec.serving.metric_names import METRIC_BY_NAME, PREFIX

_READ_TIMEOUT_S = 2.0
_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
_TOKEN_BUCKETS = tuple(step * 10**power for power in range(7) for step in (1, 2, 5))
_FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}

Family = CounterMetricFamily | GaugeMetricFamily


class ServerMetrics:
    """Counts what passes, and asks the engine when it is read. Belongs to the event loop.

    Args:
        driver: Runs the engine.
        read_gauges: Reads it; called between two rounds.
        model_name: The label of every series.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, driver: EngineDriver, read_gauges: Callable[[], EngineGauges], *, model_name: str) -> None:
        self._driver = driver
        self._read_gauges = read_gauges
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(model_name)
        self._registry.register(self._engine)
        ProcessCollector(registry=self._registry)
        self._first_token_s = self._histogram("time_to_first_token_seconds")
        self._inter_token_s = self._histogram("inter_token_latency_seconds")
        self._token_s = self._histogram("request_time_per_output_token_seconds")
        self._request_s = self._histogram("e2e_request_latency_seconds")
        self._queue_s = self._histogram("request_queue_time_seconds")
        self._prefill_s = self._histogram("request_prefill_time_seconds")
        self._decode_s = self._histogram("request_decode_time_seconds")
        self._prompt_size = self._histogram("request_prompt_tokens", buckets=_TOKEN_BUCKETS)
        self._output_size = self._histogram("request_generation_tokens", buckets=_TOKEN_BUCKETS)
        self._prompt_tokens = self._counter("prompt_tokens").labels(model_name)
        self._generation_tokens = self._counter("generation_tokens").labels(model_name)
        self._cache_queries = self._counter("prefix_cache_queries").labels(model_name)
        self._cache_hits = self._counter("prefix_cache_hits").labels(model_name)
        self._finished = self._counter("request_success")
        self._responses = self._counter("http_responses")

    async def render(self) -> bytes:
        """Give all metrics as text; those of the engine are older where a round takes long."""
        future = asyncio.wrap_future(self._driver.call(self._read_gauges))
        with contextlib.suppress(TimeoutError):
            self._engine.gauges = await asyncio.wait_for(future, _READ_TIMEOUT_S)
        return generate_latest(self._registry)

    def observe_response(self, status: int) -> None:
        """Count an answer."""
        self._responses.labels(self._model_name, str(status)).inc()

    def observe_piece(self, generation: Generation, piece: Piece) -> None:
        """Count what a round gave a choice."""
        delta = piece.delta
        timing = generation.timing(piece)
        num_tokens = len(delta.token_ids)
        self._generation_tokens.inc(num_tokens)
        if num_tokens and timing.first_at is None:
            timing.first_at = piece.made_at
            self._first_token_s.observe(piece.made_at - generation.arrival.at)
            if delta.index == 0:
                self._observe_prompt(generation, piece)
        elif num_tokens:
            self._inter_token_s.observe(piece.made_at - timing.last_at)
        timing.last_at = piece.made_at
        timing.num_tokens += num_tokens
        if delta.finish_reason is None:
            return
        self._finished.labels(self._model_name, _FINISH_REASONS[delta.finish_reason]).inc()
        self._output_size.observe(timing.num_tokens)
        if delta.finish_reason in ("stop", "length"):
            self._request_s.observe(piece.made_at - generation.arrival.at)
            if timing.first_at is not None:
                self._decode_s.observe(piece.made_at - timing.first_at)
                if timing.num_tokens > 1:
                    self._token_s.observe((piece.made_at - timing.first_at) / (timing.num_tokens - 1))

    def _observe_prompt(self, generation: Generation, piece: Piece) -> None:
        num_tokens = len(generation.prompts[piece.prompt_index])
        submission = generation.submission(piece.prompt_index)
        self._prompt_tokens.inc(num_tokens)
        self._prompt_size.observe(num_tokens)
        self._cache_queries.inc(num_tokens)
        self._cache_hits.inc(submission.num_cached_tokens)
        if submission.admitted_at is not None:
            self._queue_s.observe(max(0.0, submission.admitted_at - generation.arrival.at))
            self._prefill_s.observe(max(0.0, piece.made_at - submission.admitted_at))

    def _counter(self, name: str) -> Counter:
        metric = METRIC_BY_NAME[name]
        labels = ("model_name", *metric.labels)
        return Counter(PREFIX + name, metric.help, labels, registry=self._registry)

    def _histogram(self, name: str, *, buckets: tuple[float, ...] = _LATENCY_BUCKETS) -> Histogram:
        metric = METRIC_BY_NAME[name]
        family = Histogram(PREFIX + name, metric.help, ("model_name",), registry=self._registry, buckets=buckets)
        return family.labels(self._model_name)


class _EngineCollector(Collector):
    """Gives the series of one reading of the engine."""

    def __init__(self, model_name: str) -> None:
        self.gauges = EngineGauges()
        self._model_name = model_name

    def collect(self) -> Iterator[Family]:
        gauges = self.gauges
        num_held = gauges.num_pages - gauges.num_free_pages - gauges.num_cached_pages
        yield self._family("num_requests_running", {(): gauges.num_running})
        yield self._family("num_requests_waiting", {(): gauges.num_waiting})
        yield self._family("kv_cache_usage_perc", {(): num_held / gauges.num_pages if gauges.num_pages else 0.0})
        states = {"used": num_held, "cached": gauges.num_cached_pages, "free": gauges.num_free_pages}
        yield self._family("kv_pages", {(state,): count for state, count in states.items()})
        yield self._family("kv_pages_quarantined", {(): gauges.num_quarantined_pages})
        yield self._family("num_preemptions", {(): gauges.num_preemptions})
        drafting = gauges.speculation
        yield self._family("spec_decode_num_drafts", {(): drafting.num_drafts})
        yield self._family("spec_decode_num_draft_tokens", {(): drafting.num_draft_tokens})
        yield self._family("spec_decode_num_accepted_tokens", {(): drafting.num_accepted_tokens})
        places = enumerate(drafting.accepted_per_position)
        yield self._family("spec_decode_num_accepted_tokens_per_pos", {(str(place),): count for place, count in places})
        if gauges.disagreements_by_rank:
            ranks = enumerate(gauges.disagreements_by_rank)
            yield self._family("audit_decisions", {(): gauges.num_audited_decisions})
            yield self._family("audit_disagreements", {(str(rank),): count for rank, count in ranks})
        if gauges.shards is not None:
            ranks = enumerate(gauges.shards.num_tokens_N.tolist())
            yield self._family("kv_shard_tokens", {(str(rank),): count for rank, count in ranks})
            yield self._family("kv_shard_balance", {(): gauges.shards.balance})
            yield self._family("kv_empty_shards", {(): gauges.shards.num_empty_shards})
        if gauges.merges is not None:
            yield self._family("dcp_merges", {(): gauges.merges.num_merges})
            yield self._family("dcp_merge_seconds", {(): gauges.merges.seconds})
        for side in (gauges.intake, gauges.door):
            for name, values in () if side is None else side.series():
                yield self._family(name, values)

    def _family(self, name: str, value_by_labels: dict[tuple[str, ...], float]) -> Family:
        metric = METRIC_BY_NAME[name]
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(PREFIX + name, metric.help, labels=("model_name", *metric.labels))
        for labels, value in value_by_labels.items():
            family.add_metric((self._model_name, *labels), value)
        return family
