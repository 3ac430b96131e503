"""Tables for papers: Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from refusion_lit.reports.comparison import Comparison, Measured
from refusion_lit.reports.intervals import Interval

_MARK_MEANING = "the model was not trained for this decoder"
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip
_HEADER = (
    "decoder",
    "score %",
    "tokens/forward",
    "tokens/s",
    "calls/batch",
    "batch size",
    "Δ score",
    "Δ tokens/forward",
)


def markdown_table(comparison: Comparison) -> str:
    """Return the table of decoders in Markdown."""
    lines = [f"| {' | '.join(_HEADER)} |", f"|---|{'---:|' * (len(_HEADER) - 1)}"]
    lines += [f"| {' | '.join(cells)} |" for cells in _rows(comparison, _markdown, " *", "{} [{}, {}]")]
    return "\n".join([*lines, "", _caption(comparison, _markdown, "*"), ""])


def latex_table(comparison: Comparison) -> str:
    """Return the table of decoders in LaTeX, for the package booktabs."""
    header = " & ".join(_latex(name).replace("Δ", r"$\Delta$") for name in _HEADER)
    body = [f"{' & '.join(cells)} \\\\" for cells in _rows(comparison, _latex, r"$^{*}$", r"${}_{{[{},\,{}]}}$")]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_caption(comparison, _latex, '$^{*}$')}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(_HEADER) - 1)}}}",
            r"\toprule",
            rf"{header} \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _rows(comparison: Comparison, escape: Callable[[str], str], mark: str, interval: str) -> list[Sequence[str]]:
    differences = {id(d.row): d for d in comparison.differences}
    rows = []
    for m in comparison.measured:
        figures, difference = m.row.figures, differences.get(id(m.row))
        pair = (difference.score, difference.tokens_per_forward) if difference else (None, None)
        rows.append(
            (
                escape(m.row.label) + (mark if m.row.mismatches else ""),
                _interval(m, m.score, ".1f", interval),
                _interval(m, m.tokens_per_forward, ".2f", interval),
                _number(figures.get("tokens_per_second"), ".0f"),
                _number(figures.get("calls_per_batch"), ".1f"),
                _number(m.row.run.batch_size, "d"),
                _signed(pair[0], ".1f", interval),
                _signed(pair[1], ".2f", interval),
            )
        )
    return rows


def _interval(measured: Measured, value: Interval, form: str, template: str) -> str:
    if not measured.has_intervals:
        return format(value.estimate, form)
    return template.format(format(value.estimate, form), format(value.low, form), format(value.high, form))


def _signed(value: Interval | None, form: str, template: str) -> str:
    if value is None:
        return "--"
    return template.format(*(format(number, f"+{form}") for number in (value.estimate, value.low, value.high)))


def _number(value: float | None, form: str) -> str:
    return "--" if value is None else format(value, form)


def _caption(comparison: Comparison, escape: Callable[[str], str], mark: str) -> str:
    level = f"{100 * comparison.resampling.level:g}"
    text = escape(
        f"{level} % bootstrap intervals over prompts. Differences are paired by prompt, against {comparison.baseline}."
    )
    uneven = sum(1 for d in comparison.differences if d.num_only_row or d.num_only_baseline)
    if uneven:
        text += escape(f" {uneven} of them are over the shared prompts only, because the rows did not see the same.")
    if any(m.row.mismatches for m in comparison.measured):
        text += f" {mark if mark.startswith('$') else escape(mark)}: {_MARK_MEANING}."
    return text


def _markdown(text: str) -> str:
    """Escape what Markdown or the HTML inside it would take for its own."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{c}" if c in "\\`*_[]|#" else c for c in text)


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in " ".join(text.split()))
