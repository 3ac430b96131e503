"""Reports: tables of results, intervals, plots and pages."""

from refusion_lit.reports.comparison import Comparison, compare
from refusion_lit.reports.intervals import Resampling, accuracy_under_parallelism, pareto_front
from refusion_lit.reports.runs import Collection, read_runs
from refusion_lit.reports.write import write_report

__all__ = [
    "Collection",
    "Comparison",
    "Resampling",
    "accuracy_under_parallelism",
    "compare",
    "pareto_front",
    "read_runs",
    "write_report",
]
