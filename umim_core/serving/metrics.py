"""Metrics of a server, as Prometheus reads them."""

from __future__ import annotations

from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class ServerMetrics:
    """Counters of one server; each one's text says what it counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="umim", registry=self.registry)
        gauge = partial(Gauge, namespace="umim", registry=self.registry)
        histogram = partial(Histogram, namespace="umim", registry=self.registry, buckets=_SECONDS)
        self.requests = counter("requests", "Answered requests.", ("path", "status"))
        self.seconds = histogram("request_seconds", "From a request's head to its end.", ["path"])
        self.first_token = histogram("first_token_seconds", "From a body to the first token.")
        self.in_flight = gauge("requests_in_flight", "Requests that are being answered.")
        self.running = gauge("rows_running", "Rows that run in this process.")
        self.waiting = gauge("requests_waiting", "Requests that wait for a row.")
        self.raw_tokens = counter("prompt_tokens_raw", "Prompt tokens.")
        self.merged_tokens = counter("prompt_tokens_merged", "Prompt units after merging.")
        self.reused_tokens = counter("prompt_tokens_reused", "Prompt units not evaluated again.")
        self.generated_tokens = counter("generated_tokens", "Generated tokens.")
        self.unmerged = counter("prompts_unmerged", "Prompts whose merging failed.")

    def text(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self.registry)
