"""The HTML page: one file, no network, no script; whatever a model or a user wrote is escaped."""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from refusion_lit.reports.comparison import Comparison
from refusion_lit.reports.runs import Run
from refusion_lit.version import __version__

_NUM_EXAMPLES = 4
_NUM_EXAMPLE_ROWS = 8
_LONGEST_EXAMPLE = 1500


def html_page(comparison: Comparison, plots: Mapping[str, bytes]) -> str:
    """Return the page.

    Args:
        comparison: What to show.
        plots: PNG files by name; the first is the trade-off, the others are the grids in their order.
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
    images = [b64encode(content).decode("ascii") for content in plots.values()]
    return environment.get_template("report.html.jinja").render(
        comparison=comparison,
        title=_title(comparison.collection.runs),
        findings=_findings(comparison),
        tradeoff=images[0],
        maps=list(zip(comparison.grids, images[1:], strict=True)),
        runs=[(run, _facts(run)) for run in comparison.collection.runs],
        examples=_examples(comparison),
        hidden_example_rows=max(len(rows) - _NUM_EXAMPLE_ROWS, 0),
        any_marked=any(row.mismatches for row in rows),
        uneven=[d for d in comparison.differences if d.num_only_row or d.num_only_baseline],
        version=__version__,
        level=f"{100 * comparison.resampling.level:g}",
        marked_methods={row.method for row in rows if row.mismatches},
        best=max(m.score.estimate for m in comparison.measured),
    )


def _title(runs: list[Run]) -> str:
    sources = list(dict.fromkeys(run.source for run in runs))
    return ", ".join(sources[:3]) + (f" and {len(sources) - 3} more" if len(sources) > 3 else "")


def _findings(comparison: Comparison) -> list[str]:
    """Say in words what the table says."""
    most = max(comparison.measured, key=lambda m: m.score.estimate)
    fastest = max(comparison.measured, key=lambda m: m.tokens_per_forward.estimate)
    front = [m.row.label for m in comparison.measured if m.on_front]
    form = "{}: {} with a score of {:.1f} % at {:.2f} tokens per forward."
    lines = [
        form.format(name, m.row.label, m.score.estimate, m.tokens_per_forward.estimate)
        for name, m in (("Best score", most), ("Most tokens per forward", fastest))
    ]
    if len(comparison.measured) > 1:
        shown = ", ".join(front[:8]) + (f" and {len(front) - 8} more" if len(front) > 8 else "")
        lines.append(f"On the Pareto front (no other row is both better and faster): {shown}.")
    clear = [d for d in comparison.differences if d.score and (d.score.low > 0 or d.score.high < 0)]
    if comparison.differences:
        names = ", ".join(f"{d.row.label} ({d.score.estimate:+.1f})" for d in clear[:8] if d.score)
        more = f" and {len(clear) - 8} more" if len(clear) > 8 else ""
        lines.append(
            f"Score told apart from {comparison.baseline} (the interval of the paired difference leaves out 0): "
            f"{names + more if names else 'none'}."
        )
    return lines


def _facts(run: Run) -> dict[str, str]:
    """Name a run's circumstances, as far as they were recorded."""
    env: dict[str, Any] = run.environment
    hardware = env.get("hardware") or {}
    git = env.get("git")
    command = env.get("command")
    devices = ", ".join(hardware.get("devices") or []) or "no GPU"
    facts = {
        "folder": run.name,
        "command": shlex.join(command) if isinstance(command, list) else command,
        "seed": env.get("seed"),
        "sampling": ", ".join(f"{k}={v}" for k, v in (run.results.get("sampling") or {}).items()),
        "batch size": run.batch_size,
        "git": f"{git.get('commit')}{' with uncommitted changes' if git.get('dirty') else ''}" if git else None,
        "refusion-lit": env.get("refusion_lit"),
        "python": env.get("python"),
        "packages": ", ".join(f"{k} {v}" for k, v in (env.get("packages") or {}).items()),
        "hardware": f"{devices}; {hardware.get('num_cpus')} CPUs, {hardware.get('num_threads')} threads, "
        f"{hardware.get('system')} {hardware.get('machine')}"
        if hardware
        else None,
    }
    return {name: str(value) for name, value in facts.items() if value is not None and value != ""}


def _examples(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the first prompts with the responses of the first rows."""
    rows = [m.row for m in comparison.measured][:_NUM_EXAMPLE_ROWS]
    ids = list(dict.fromkeys(i for row in rows for i in row.predictions))[:_NUM_EXAMPLES]
    examples = []
    for identity in ids:
        found = [(row, row.predictions[identity]) for row in rows if identity in row.predictions]
        first = found[0][1]
        examples.append(
            {
                "id": identity,
                "prompt": _cut(first.prompt),
                "reference": _cut(first.reference or ""),
                "responses": [(row, _cut(p.response), p.score, p.num_tokens, p.num_forwards) for row, p in found],
            }
        )
    return examples


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_EXAMPLE else f"{text[:_LONGEST_EXAMPLE]} …"
