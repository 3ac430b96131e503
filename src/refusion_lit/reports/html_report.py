"""The HTML report: one self-contained file without scripts; all text from models and users is escaped."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from refusion_lit.reports.comparison import Comparison, MeasuredRow
from refusion_lit.reports.environment import described_environment
from refusion_lit.reports.plots import STYLE
from refusion_lit.reports.runs import Run
from refusion_lit.version import __version__

_NUM_EXAMPLES = 4
_MAX_EXAMPLE_ROWS = 8
_MAX_EXAMPLE_LENGTH = 1500
_MAX_LISTED_SOURCES = 3
_MAX_LISTED_ROWS = 8
_FEW_PROMPTS = 30


def html_report(comparison: Comparison, plots: Mapping[str, str]) -> str:
    """Render the report.

    Args:
        comparison: The rows, differences and grids to show.
        plots: SVG elements by name: the trade-off plot first, then one heat map per grid in the order of the grids.
    """
    environment = Environment(
        loader=PackageLoader("refusion_lit", "reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["to_yaml"] = lambda values: yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    rows = [m.row for m in comparison.measured]
    runs = comparison.collection.runs
    images = [Markup(content) for content in plots.values()]
    return environment.get_template("report.html.jinja").render(
        comparison=comparison,
        title=_listed(list(dict.fromkeys(run.source for run in runs)), _MAX_LISTED_SOURCES),
        findings=_findings(comparison),
        tradeoff=images[0],
        maps=images[1:],
        plot_style=STYLE,
        any_partial=any(m.is_partial for m in comparison.measured),
        runs=[(run, _facts(run)) for run in runs],
        examples=_examples(comparison),
        hidden_example_rows=max(len(rows) - _MAX_EXAMPLE_ROWS, 0),
        any_marked=any(row.mismatches for row in rows),
        uneven=[d for d in comparison.differences if d.num_only_row or d.num_only_baseline],
        version=__version__,
        level=f"{100 * comparison.bootstrap.level:g}",
    )


def _listed(names: Sequence[str], limit: int) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _findings(comparison: Comparison) -> list[str]:
    """Return the main results as sentences."""
    complete = [m for m in comparison.measured if not m.is_partial]
    best = max(complete, key=lambda m: (m.score.estimate, m.tokens_per_forward.estimate))
    fastest = max(complete, key=lambda m: (m.tokens_per_forward.estimate, m.score.estimate))
    if len(comparison.measured) == 1:
        lines = [f"{_result(best)}."]
    elif best.score.estimate == 0:
        lines = [f"No row scores above 0. Most tokens per forward: {_result(fastest)}."]
    elif best is fastest:
        lines = [f"Best score and most tokens per forward: {_result(best)}."]
    else:
        lines = [f"Best score: {_result(best)}.", f"Most tokens per forward: {_result(fastest)}."]
    ties = [m.row.label for m in complete if m is not best and m.score.estimate == best.score.estimate > 0]
    if ties:
        lines.append(f"The best score is shared by {_listed(ties, _MAX_LISTED_ROWS)}.")
    if partial := [f"{m.row.label} ({m.num_prompts})" for m in comparison.measured if m.is_partial]:
        lines.append(
            f"Left out here, because they have less than half of the {best.num_expected} prompts: "
            f"{_listed(partial, _MAX_LISTED_ROWS)}."
        )
    if best.num_prompts < _FEW_PROMPTS:
        lines.append(f"{best.num_prompts} prompts are few: differences between rows are mostly due to chance.")
    if len(complete) > 1:
        front = _listed([m.row.label for m in complete if m.on_front], _MAX_LISTED_ROWS)
        lines.append(f"On the Pareto front (no other row is both better and faster): {front}.")
    if comparison.differences:
        significant = [d for d in comparison.differences if d.score and (d.score.low > 0 or d.score.high < 0)]
        names = [f"{d.row.label} ({d.score.estimate:+.1f})" for d in significant if d.score]
        lines.append(
            f"Score differs from {comparison.baseline} (the interval of the paired difference excludes 0): "
            f"{_listed(names, _MAX_LISTED_ROWS) or 'none'}."
        )
    return lines


def _result(m: MeasuredRow) -> str:
    score = f"{m.score.estimate:.1f} %"
    if m.has_intervals:
        score += f" ({m.score.low:.1f} to {m.score.high:.1f})"
    prompts = f"{m.num_prompts} prompt{'' if m.num_prompts == 1 else 's'}"
    return (
        f"{m.row.label} with a score of {score} on {prompts}, at {m.tokens_per_forward.estimate:.2f} tokens per forward"
    )


def _facts(run: Run) -> dict[str, str]:
    """Return how a run was made, by name, without what was not recorded."""
    command = run.environment.get("command")
    facts = {
        "folder": run.name,
        "command": shlex.join(command) if isinstance(command, list) else command,
        "seed": run.environment.get("seed"),
        "sampling": ", ".join(f"{name}={value}" for name, value in (run.results.get("sampling") or {}).items()),
        "batch size": run.batch_size,
        **described_environment(run.environment),
    }
    return {name: str(value) for name, value in facts.items() if value is not None and value != ""}


def _examples(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the first prompts with the responses of the first rows."""
    rows = [m.row for m in comparison.measured][:_MAX_EXAMPLE_ROWS]
    ids = list(dict.fromkeys(i for row in rows for i in row.predictions))[:_NUM_EXAMPLES]
    examples = []
    for identity in ids:
        found = [(row, row.predictions[identity]) for row in rows if identity in row.predictions]
        first = found[0][1]
        examples.append(
            {
                "id": identity,
                "prompt": _truncate(first.prompt),
                "reference": _truncate(first.reference or ""),
                "responses": [(row, _truncate(p.response), p.score, p.num_tokens, p.num_forwards) for row, p in found],
            }
        )
    return examples


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_EXAMPLE_LENGTH else f"{text[:_MAX_EXAMPLE_LENGTH]} …"
