"""Traces of decodes: save and load, statistics, terminal animation and a self-contained HTML page."""

from refusion_lit.traces.document import Trace, check_replaceable, read_trace, trace_of, write_trace
from refusion_lit.traces.html import page
from refusion_lit.traces.terminal import animate, print_statistics
from refusion_lit.traces.timeline import timeline, trace_statistics

__all__ = [
    "Trace",
    "animate",
    "check_replaceable",
    "page",
    "print_statistics",
    "read_trace",
    "timeline",
    "trace_of",
    "trace_statistics",
    "write_trace",
]
