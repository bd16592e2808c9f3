"""Metrics of a server, as Prometheus reads them."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class ServerMetrics:
    """Counters of one server.

    Attributes:
        requests: Answered requests by path and status.
        seconds: Seconds from a request's head to the end of its answer, by path.
        first_token: Seconds from a body to the first token of its answer.
        in_flight: Requests that are being answered.
        running: Rows that run; of our own engine.
        waiting: Requests that wait for a row; of our own engine.
        raw_tokens: Prompt tokens.
        merged_tokens: What they were merged to.
        reused_tokens: Of those, what was not evaluated again; of our own engine.
        generated_tokens: Generated tokens.
        unmerged: Prompts that stayed raw because merging them failed; of a gateway.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"umim_{name}", about, labels, registry=self.registry)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"umim_{name}", about, registry=self.registry)

        def histogram(name: str, about: str, *labels: str) -> Histogram:
            return Histogram(
                f"umim_{name}", about, labels, registry=self.registry, buckets=_SECONDS
            )

        self.requests = counter("requests", "Answered requests.", "path", "status")
        self.seconds = histogram("request_seconds", "Seconds of a request.", "path")
        self.first_token = histogram("first_token_seconds", "Seconds to the first token.")
        self.in_flight = gauge("requests_in_flight", "Requests that are being answered.")
        self.running = gauge("rows_running", "Rows that run.")
        self.waiting = gauge("requests_waiting", "Requests that wait for a row.")
        self.raw_tokens = counter("prompt_tokens_raw", "Prompt tokens.")
        self.merged_tokens = counter("prompt_tokens_merged", "Prompt units after merging.")
        self.reused_tokens = counter("prompt_tokens_reused", "Prompt units not evaluated again.")
        self.generated_tokens = counter("generated_tokens", "Generated tokens.")
        self.unmerged = counter("prompts_unmerged", "Prompts whose merging failed.")

    def text(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self.registry)
