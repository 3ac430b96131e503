"""Reports: result files, bootstrap intervals, tables, plots, the HTML report and the model card."""

from refusion_lit.reports.comparison import Comparison, compare
from refusion_lit.reports.intervals import Bootstrap, accuracy_under_parallelism, pareto_front, wilson
from refusion_lit.reports.runs import Collection, read_runs
from refusion_lit.reports.write import write_report

__all__ = [
    "Bootstrap",
    "Collection",
    "Comparison",
    "accuracy_under_parallelism",
    "compare",
    "pareto_front",
    "read_runs",
    "wilson",
    "write_report",
]
