"""Reports: result files, bootstrap intervals, tables, plots, the HTML report and model cards."""

from refusion_lit.reports.comparison import Comparison, compare, pareto_front, wilson
from refusion_lit.reports.runs import Collection, read_runs
from refusion_lit.reports.write import write_report

__all__ = [
    "Collection",
    "Comparison",
    "compare",
    "pareto_front",
    "read_runs",
    "wilson",
    "write_report",
]
