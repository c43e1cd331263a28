"""Counters and timings in Prometheus' form, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from .generation import Generation

disable_created_metrics()  # a second series for every counter, which says when it began

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """What /metrics tells."""

    def __init__(self, engine_up: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "strata_requests", "HTTP requests by route and status (499: the client left)", ["route", "status"],
            registry=self.registry,
        )  # fmt: skip
        self.active = Gauge("strata_requests_active", "HTTP requests being answered", registry=self.registry)
        self.seconds = self._histogram("strata_request_seconds", "Time from a request to the end of its answer")
        self.first = self._histogram("strata_first_token_seconds", "Time from a request to its first text")
        self.tokens = Counter(
            "strata_tokens", "Tokens by kind; cached is a part of prompt", ["kind"], registry=self.registry
        )
        up = Gauge("strata_engine_up", "1 if the engine can be used", registry=self.registry)
        up.set_function(lambda: float(engine_up()))

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, ["route"], buckets=SECONDS, registry=self.registry)

    def count(self, route: str, begun: float, generations: Sequence[Generation]) -> None:
        """Add a request's generations; `begun`: when it came, by time.monotonic()."""
        shown = [g.first_text for g in generations if g.first_text is not None]
        if shown:
            self.first.labels(route).observe(min(shown) - begun)
        for outcome in (g.outcome for g in generations if g.outcome is not None):
            self.tokens.labels("prompt").inc(outcome.prompt)
            self.tokens.labels("cached").inc(outcome.reused)
            self.tokens.labels("generated").inc(outcome.generated)
            self.tokens.labels("drafts_offered").inc(outcome.drafts_offered)
            self.tokens.labels("drafts_accepted").inc(outcome.drafts_accepted)

    def text(self) -> bytes:
        return generate_latest(self.registry)
