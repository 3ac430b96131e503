"""Metrics: loss means and decoding throughput, right under distributed sync."""

from refusion_lit.metrics.loss import TermMeans
from refusion_lit.metrics.throughput import DecodingMetrics

__all__ = ["DecodingMetrics", "TermMeans"]
