"""Checks annotated shapes and types while tests run, in the modules that annotate shapes.

Other modules hold no tensors, or plain ones: pyright checks their types, at no cost for the tests.
"""

from __future__ import annotations

from pathlib import Path

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

SOURCE = Path(__file__).parents[1] / "src"

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an integer is a number


def modules_with_shapes() -> list[str]:
    """Return the modules that import jaxtyping."""
    paths = (path for path in SOURCE.rglob("*.py") if "from jaxtyping import" in path.read_text(encoding="utf-8"))
    names = (".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in paths)
    return sorted(names)


def check_shapes() -> None:
    """Check what is imported from now on, in this process."""
    install_import_hook(modules_with_shapes(), "shape_checks.checked")
