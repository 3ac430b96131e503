"""Draws the packages and who imports whom, from the code itself: python docs/architecture.py."""

from __future__ import annotations

import argparse
import ast
import re
import tomllib
from html import escape
from importlib import import_module
from pathlib import Path

from pictures import text

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "refusion_lit"
TARGET = Path(__file__).parent / "img" / "architecture.svg"
STEP = 26
LEFT, TOP = 120, 118


def layers() -> list[list[str]]:
    """Return the packages of each layer, highest first, as the import check has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    return [[package.strip() for package in layer.replace(":", "|").split("|")] for layer in contract["layers"]]


def role(package: str) -> str:
    """Return the first line of a package's docstring."""
    path = PACKAGE / package / "__init__.py"
    source = (path if path.is_file() else PACKAGE / f"{package}.py").read_text(encoding="utf-8")
    line = (ast.get_docstring(ast.parse(source)) or "").splitlines()[0].rstrip(".")
    line = re.sub(r":\w+:`[~.]*([^`]*)`", r"\1", line).replace("``", "")
    name, _, rest = line.partition(": ")
    return rest[:1].upper() + rest[1:] if name.lower() == package else line


def imports() -> dict[tuple[str, str], int]:
    """Return how many modules of a package import from another package."""
    grimp = import_module("grimp")  # comes with the import check
    graph = grimp.build_graph("refusion_lit", cache_dir=None)
    counts: dict[tuple[str, str], int] = {}
    for module in graph.modules:
        packages = {imported.split(".")[1] for imported in graph.find_modules_directly_imported_by(module)
                 if "." in imported}  # fmt: skip
        parts = module.split(".")
        for package in packages - {parts[1]} if len(parts) > 1 else ():
            counts[parts[1], package] = counts.get((parts[1], package), 0) + 1
    return counts


def drawing() -> str:
    """Return the picture: a row per package, a dot for each package that it imports, bands for layers."""
    rows = layers()
    packages = [package for layer in rows for package in layer]
    place = {package: number for number, package in enumerate(packages)}
    roles = {package: role(package) for package in packages}
    right = LEFT + STEP * len(packages) + 16
    width, height = right + 7 * max(map(len, roles.values())) + 8, TOP + STEP * len(packages) + 30
    parts, top = [], TOP
    for number, layer in enumerate(rows):
        shade = "#eef3f2" if number % 2 else "#dfe9e7"
        parts.append(f'<rect x="4" y="{top}" width="{width - 8}" height="{STEP * len(layer)}" fill="{shade}"/>')
        top += STEP * len(layer)
    for package, number in place.items():
        y, x = TOP + STEP * number, LEFT + STEP * number
        parts.append(text(12, y + 17, f"<tspan font-weight='600'>{package}</tspan>", 13))
        parts.append(text(right, y + 17, escape(roles[package]), 12))
        parts.append(f'<text transform="translate({x + 17} {TOP - 8}) rotate(-60)" font-size="12">{package}</text>')
        parts.append(f'<rect x="{x + 3}" y="{y + 3}" width="{STEP - 6}" height="{STEP - 6}" fill="#9bb8b2"/>')
    for (importer, imported), count in sorted(imports().items()):
        x, y = LEFT + STEP * place[imported] + STEP / 2, TOP + STEP * place[importer] + STEP / 2
        title = f"<title>{importer} imports {imported} in {count} modules</title>"
        parts.append(f'<circle cx="{x}" cy="{y}" r="6" fill="#20504a">{title}</circle>')
    legend = "A dot: the row's package imports the column's. All dots lie right of the diagonal: imports run one way."
    parts.append(text(12, height - 10, legend, 12))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Packages and their imports" font-family="system-ui, sans-serif">'
        f'<rect width="{width}" height="{height}" fill="#fbfbfb"/>'
    )
    return head + "".join(parts) + "</svg>\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    TARGET.write_text(drawing(), encoding="utf-8")
