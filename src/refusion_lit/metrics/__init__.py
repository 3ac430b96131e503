"""Metrics: loss means and decoding figures, exact over several processes."""

from refusion_lit.metrics.loss import TermMeans
from refusion_lit.metrics.throughput import DecodingMetrics

__all__ = ["DecodingMetrics", "TermMeans"]
