"""What a finished test leaves in its run's directory besides predictions."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from refusion_lit.reports.environment import config_of, environment_of
from refusion_lit.reports.write import write_report


def write_results(directory: Path, values: Mapping[str, Any], *, seed: int) -> Path:
    """Write ``results.json``.

    Args:
        directory: The run's directory.
        values: Options and figures; the run's environment and config are added.
        seed: The run's seed, for a directory that does not tell its environment.
    """
    results = {**values, "environment": environment_of(directory, seed), "config": config_of(directory)}
    path = directory / "results.json"
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return path


def write_page(results: Path) -> None:
    """Write the page beside the results, which are safe by now whatever happens here."""
    try:
        page = write_report([results])[0]
    except (ValueError, OSError) as error:
        warnings.warn(f"the results are written, but no report: {error}", stacklevel=2)
    else:
        rank_zero_info(f"report: {page}")
