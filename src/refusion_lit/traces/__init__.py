"""Traces of decodes: save and load, statistics, and a self-contained HTML page."""

from refusion_lit.traces.document import Trace, check_replaceable, read_trace, trace_of, write_trace
from refusion_lit.traces.html import page
from refusion_lit.traces.timeline import timeline, trace_statistics

__all__ = [
    "Trace",
    "check_replaceable",
    "page",
    "read_trace",
    "timeline",
    "trace_of",
    "trace_statistics",
    "write_trace",
]
