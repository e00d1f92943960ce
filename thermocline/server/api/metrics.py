"""`GET /metrics`: counters of the server and the engine's state, for Prometheus. No text of any request.

Names begin with thermocline_. The names that llama.cpp's dashboards read are there, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from thermocline.engine.engine import Counts
from thermocline.server.process.engine_process import EngineProcess
from thermocline.server.process.messages import Event, Failed, Finished, Token

TEXT = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' format
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counters of events, updated on the event loop's thread."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self.registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"thermocline_{name}", about, labels, registry=self.registry)

        def histogram(name: str, about: str) -> Histogram:
            return Histogram(f"thermocline_{name}", about, registry=self.registry, buckets=SECONDS)

        self.tokens = counter("tokens_generated", "Tokens sampled")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts of answers that are complete")
        self.cached_tokens = counter("cached_tokens", "Of them, those whose keys and values were there")
        self.failed = counter("requests_failed", "Answers that ended in an error", "error")
        self.ram_bytes = counter("ram_read_bytes", "Weights, keys and values read from memory for tokens")
        self.first_token = histogram("first_token_seconds", "From submission to the first token")
        self.each_token = histogram("token_seconds", "Mean between an answer's tokens")
        self.prompt_s = self.decode_s = 0.0
        self.registry.register(_Engine(self))

    def observe(self, event: Event) -> None:
        match event:
            case Token():
                self.tokens.inc()
            case Failed(error=error):
                self.failed.labels(error).inc()
            case Finished(figures=f):
                self.prompt_tokens.inc(f.prompt_tokens)
                self.cached_tokens.inc(f.cached_tokens)
                if f.bytes_per_token is not None:
                    self.ram_bytes.inc(f.bytes_per_token * (f.tokens - 1))
                if f.first_token_s is not None:
                    self.first_token.observe(f.first_token_s)
                if f.prompt_tokens_per_s:
                    self.prompt_s += (f.prompt_tokens - f.cached_tokens) / f.prompt_tokens_per_s
                if f.tokens_per_s:
                    self.each_token.observe(1 / f.tokens_per_s)
                    self.decode_s += (f.tokens - 1) / f.tokens_per_s

    def text(self) -> bytes:
        return generate_latest(self.registry)


def routes(metrics: Metrics) -> list[Route]:
    async def answer(request: Request) -> Response:
        return Response(metrics.text(), media_type=TEXT)

    return [Route("/metrics", answer, methods=["GET"])]


class _Engine(Collector):
    """The engine's state at the moment of the request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        m, e = self._metrics, self._metrics.engine
        b = e.heartbeat
        c = b.counts or Counts(0, e.slots, 0, 0, 0, 0, 0, 0, 0)
        waiting = max(0, e.active - c.running)

        def value(counter: Counter) -> float:
            return float(next(iter(counter.collect())).samples[0].value)

        gauges = {
            "thermocline_ready": ("1 where requests are answered", float(e.ready)),
            "thermocline_heartbeat_age_seconds": ("Since the engine was last heard of", e.heartbeat_age_s),
            "thermocline_requests_active": ("Answers being computed", c.running),
            "thermocline_requests_queued": ("Answers that wait for a slot", waiting),
            "thermocline_slots_total": ("Answers that can be computed together", e.slots),
            "thermocline_slots_free": ("Of them, those that are free", e.slots - c.running),
            "thermocline_kv_blocks_total": ("Blocks of the cache of keys and values", c.kv_blocks),
            "thermocline_kv_blocks_free": ("Of them, those that can be given out", c.kv_free + c.kv_cached),
            "thermocline_kv_blocks_cached": ("Of those, named by texts that may come again", c.kv_cached),
            "thermocline_states_total": ("Slots for the states of recurrent layers", c.states),
            "thermocline_states_free": (
                "Of them, those that can be given out",
                c.states_free + c.states_cached,
            ),
            "thermocline_states_cached": ("Of those, named by texts that may come again", c.states_cached),
            "thermocline_longest_step_seconds": ("The longest step since the engine began", b.longest_step_s),
            "llamacpp:requests_processing": ("Answers being computed", c.running),
            "llamacpp:requests_deferred": ("Answers that wait for a slot", waiting),
        }
        for name, (about, x) in gauges.items():
            yield GaugeMetricFamily(name, about, value=max(0.0, float(x)))
        counters = {
            "thermocline_requests_cancelled": ("Answers that nobody waited for to the end", e.cancelled),
            "thermocline_engine_restarts": ("Times that the engine crashed", e.restarts),
            "thermocline_engine_steps": ("Steps since the engine began", b.steps),
            "llamacpp:prompt_tokens": ("Tokens of prompts", value(m.prompt_tokens)),
            "llamacpp:prompt_seconds": ("Spent on prompts", m.prompt_s),
            "llamacpp:tokens_predicted": ("Tokens sampled", value(m.tokens)),
            "llamacpp:tokens_predicted_seconds": ("Spent on them", m.decode_s),
        }
        for name, (about, x) in counters.items():
            yield CounterMetricFamily(name, about, value=float(x))
        for key, x in (b.tiers or {}).items():
            yield CounterMetricFamily(f"thermocline_disk_{key}", f"Of neurons on disk: {key}", value=x)
