"""Figures of the server in Prometheus's text format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from refusion_lit.serving.worker import Worker

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counts requests, tokens, forwards and times.

    Args:
        worker: Its rows and queue are shown.
    """

    def __init__(self, worker: Worker) -> None:
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry, "namespace": "refusion_lit"}
        outcome = "Requests by outcome: done, failed, gone (the client left), busy (429)"
        self._requests = Counter("requests", outcome, ["outcome"], **own)
        self._prompt_tokens = Counter("prompt_tokens", "Tokens of prompts", **own)
        self._tokens = Counter("completion_tokens", "Tokens of answers", **own)
        self._forwards = Counter("forwards", "Forwards, as each prompt counts them", **own)
        self._seconds = Histogram("request_seconds", "Time of a request", buckets=_SECONDS, **own)
        self._first = Histogram("first_text_seconds", "Time to the first text", buckets=_SECONDS, **own)
        Gauge("rows_in_flight", "Answers in flight", **own).set_function(lambda: worker.num_active)
        Gauge("waiting", "Answers that wait for a row", **own).set_function(lambda: worker.num_waiting)
        Gauge("calls", "Calls of the model since the start", **own).set_function(lambda: worker.num_calls)

    def count(self, outcome: str) -> None:
        """Count a request that was refused."""
        self._requests.labels(outcome).inc()

    def ended(self, outcome: str, usage: Mapping[str, Any], seconds: float, first: float | None) -> None:
        """Count a request that has ended."""
        self.count(outcome)
        self._prompt_tokens.inc(usage["prompt_tokens"])
        self._tokens.inc(usage["completion_tokens"])
        self._forwards.inc(usage["forwards"])
        self._seconds.observe(seconds)
        if first is not None:
            self._first.observe(first)

    def text(self) -> bytes:
        """Return all figures."""
        return generate_latest(self._registry)
