"""Traces of decodes: saved and read back, counted, animated in a terminal, and shown on an HTML page."""

from refusion_lit.traces.document import Trace, read_trace, trace_of, write_trace
from refusion_lit.traces.page import page
from refusion_lit.traces.statistics import TraceStatistics, trace_statistics
from refusion_lit.traces.terminal import animate, print_statistics
from refusion_lit.traces.timeline import Change, Timeline, timeline

__all__ = [
    "Trace",
    "trace_of",
    "read_trace",
    "write_trace",
    "Change",
    "Timeline",
    "timeline",
    "TraceStatistics",
    "trace_statistics",
    "animate",
    "print_statistics",
    "page",
]
