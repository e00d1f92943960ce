"""`GET /metrics`: counters of the server and the engine's state, for Prometheus. No text of any request.

Names begin with thermocline_. The names that llama.cpp's dashboards read are there, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from thermocline.engine.engine import Counts
from thermocline.engine.prompt_cache.cache import PromptCacheCounts
from thermocline.server.api.models.registered import RegisteredModel
from thermocline.server.api.models.registry import Registry
from thermocline.server.process.messages import Event, Failed, Finished, Token

TEXT = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' format
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
AnyMetric = TypeVar("AnyMetric", Counter, Histogram)
Values = dict[str, tuple[str, float]]  # by name: about it, and its value


@dataclass
class Spent:
    """Seconds of one model's answers."""

    prompt_s: float = 0.0
    decode_s: float = 0.0


class Metrics:
    """Counters of events, updated on the event loop's thread. Of several models each has a label."""

    def __init__(self, models: Registry) -> None:
        self.models = models
        self.registry = CollectorRegistry()
        self.label_names = ("model",) if models.several else ()

        def counter(name: str, about: str, *labels: str) -> Counter:
            names = (*self.label_names, *labels)
            return Counter(f"thermocline_{name}", about, names, registry=self.registry)

        def histogram(name: str, about: str) -> Histogram:
            names, registry = self.label_names, self.registry
            return Histogram(f"thermocline_{name}", about, names, registry=registry, buckets=SECONDS)

        self.tokens = counter("tokens_generated", "Tokens sampled")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts of answers that are complete")
        self.cached_tokens = counter("cached_tokens", "Of them, those whose keys and values were there")
        self.failed = counter("requests_failed", "Answers that ended in an error", "error")
        self.ram_bytes = counter("ram_read_bytes", "Weights, keys and values read from memory for tokens")
        self.first_token = histogram("first_token_seconds", "From submission to the first token")
        self.each_token = histogram("token_seconds", "Mean between an answer's tokens")
        self.spent: defaultdict[str, Spent] = defaultdict(Spent)
        self.registry.register(_Engines(self))

    def labels(self, model: str) -> tuple[str, ...]:
        return (model,) if self.label_names else ()

    def of(self, metric: AnyMetric, model: str, *labels: str) -> AnyMetric:
        """Return a metric's part of a model."""
        given = (*self.labels(model), *labels)
        return metric.labels(*given) if given else metric

    def observe(self, model: str, event: Event) -> None:
        match event:
            case Token():
                self.of(self.tokens, model).inc()
            case Failed(error=error):
                self.of(self.failed, model, error).inc()
            case Finished(figures=f):
                self.of(self.prompt_tokens, model).inc(f.prompt_tokens)
                self.of(self.cached_tokens, model).inc(f.cached_tokens)
                if f.bytes_per_token is not None:
                    self.of(self.ram_bytes, model).inc(f.bytes_per_token * (f.tokens - 1))
                if f.first_token_s is not None:
                    self.of(self.first_token, model).observe(f.first_token_s)
                if f.prompt_tokens_per_s:
                    spent = (f.prompt_tokens - f.cached_tokens) / f.prompt_tokens_per_s
                    self.spent[model].prompt_s += spent
                if f.tokens_per_s:
                    self.of(self.each_token, model).observe(1 / f.tokens_per_s)
                    self.spent[model].decode_s += (f.tokens - 1) / f.tokens_per_s

    def text(self) -> bytes:
        return generate_latest(self.registry)


def routes(metrics: Metrics) -> list[Route]:
    async def answer(request: Request) -> Response:
        return Response(metrics.text(), media_type=TEXT)

    return [Route("/metrics", answer, methods=["GET"])]


def _prompt_cache(c: PromptCacheCounts | None) -> Values:
    """Return the counters of the prompt cache on disk, or of a GPU's copies in RAM, if there is one."""
    if c is None:
        return {}
    name = "thermocline_prompt_cache"
    return {
        f"{name}_restores": ("Prompts that had a prefix on disk, or in a GPU's copies in RAM", c.restored),
        f"{name}_restored_tokens": ("Tokens of these prefixes", c.tokens),
        f"{name}_read_bytes": ("Read for them", c.read_bytes),
        f"{name}_written_bytes": ("Written to the prompt cache", c.written_bytes),
        f"{name}_damaged_files": ("Files that were not what was written, and were deleted", c.damaged),
    }


class _Engines(Collector):
    """The engines' state at the moment of the request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        m = self._metrics
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for model in m.models.models.values():
            for kind, values in (
                (GaugeMetricFamily, self._gauges(model)),
                (CounterMetricFamily, self._counters(model)),
            ):
                for name, (about, x) in values.items():
                    if name not in families:
                        families[name] = kind(name, about, labels=m.label_names)
                    families[name].add_metric(m.labels(model.name), max(0.0, float(x)))
        yield from families.values()
        if m.models.several:
            yield from self._of_all()

    def _of_all(self) -> Iterator[Metric]:
        r = self._metrics.models
        gauges = {
            "thermocline_models_loaded": ("Models that are loaded", len(list(r.loaded()))),
            "thermocline_memory_budget_bytes": ("Memory for the models that are loaded", r.budget_bytes),
            "thermocline_memory_held_bytes": ("Of it, what they may take at most", r.held_bytes),
        }
        for name, (about, x) in gauges.items():
            yield GaugeMetricFamily(name, about, value=float(x))
        unloads = "Times that a model was unloaded for another"
        yield CounterMetricFamily("thermocline_model_unloads", unloads, value=float(r.unloads))

    def _gauges(self, model: RegisteredModel) -> Values:
        e = model.engine
        b = e.heartbeat
        c = b.counts or Counts(0, e.slots, 0, 0, 0, 0, 0, 0, 0)
        waiting = max(0, e.active - c.running)
        ready: Values = {"thermocline_ready": ("1 where requests are answered", e.ready)}
        if self._metrics.models.several and model.state != "loaded":
            return ready
        return {
            **ready,
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

    def _counters(self, model: RegisteredModel) -> Values:
        m, e = self._metrics, model.engine
        b, spent = e.heartbeat, m.spent[model.name]

        def value(counter: Counter) -> float:
            return float(next(iter(m.of(counter, model.name).collect())).samples[0].value)

        found: Values = {
            "thermocline_requests_cancelled": ("Answers that nobody waited for to the end", e.cancelled),
            "thermocline_engine_restarts": ("Times that the engine crashed", e.restarts),
            "thermocline_engine_steps": ("Steps since the engine began", b.steps),
            "llamacpp:prompt_tokens": ("Tokens of prompts", value(m.prompt_tokens)),
            "llamacpp:prompt_seconds": ("Spent on prompts", spent.prompt_s),
            "llamacpp:tokens_predicted": ("Tokens sampled", value(m.tokens)),
            "llamacpp:tokens_predicted_seconds": ("Spent on them", spent.decode_s),
        }
        found |= _prompt_cache(None if b.counts is None else b.counts.disk)
        if m.models.several:
            found["thermocline_model_loads"] = ("Times that the model was loaded", model.loads)
        for key, x in (b.tiers or {}).items():
            found[f"thermocline_disk_{key}"] = (f"Of neurons on disk: {key}", x)
        return found
