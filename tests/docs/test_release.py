"""What a release publishes: its metadata, the links of its readme, one version everywhere, and pinned workflows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import refusion_lit
from support.modules import load_module

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return load_module(ROOT / "hatch_build.py")


def test_a_published_readme_has_only_absolute_links_to_files_that_exist(build: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = build.absolute(readme, "https://host/owner/name", "v9")
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)#]+)", text)
    assert len(links) > 30
    assert all(target.startswith("https://") for _, target in links)
    for picture, target in links:
        path = target.removeprefix(f"https://host/owner/name/{'raw' if picture else 'blob'}/v9/")
        assert path.startswith("https://") or (ROOT / path).exists(), target


def test_urls_are_those_of_the_repository_that_builds(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPOSITORY_URL", "https://host/owner/name/")
    metadata: dict[str, object] = {}
    build.CustomMetadataHook(str(ROOT), {}).update(metadata)
    urls, readme = metadata["urls"], metadata["readme"]
    assert isinstance(urls, dict)
    assert isinstance(readme, dict)
    assert {"Homepage", "Documentation", "Source", "Changelog", "Issues"} < urls.keys()
    assert all(url.startswith("https://") and "name//" not in url for url in urls.values())
    assert f"https://host/owner/name/blob/v{refusion_lit.__version__}/docs/own_data.md" in str(readme)
    assert "\ngit clone https://host/owner/name refusion-lit && cd refusion-lit\n" in readme["text"]
    assert "REPOSITORY" not in readme["text"]


def test_one_version_and_date_everywhere() -> None:
    """A version that is not released has no date."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    versions = re.findall(r"^## (\d\S*) - (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert (citation["version"], str(citation.get("date-released", "not released"))) == versions[0]
    assert citation["version"] == refusion_lit.__version__
    assert "2512.13586" in citation["preferred-citation"]["url"]


UNTESTED = {"all", "data", "ray"}
"""Extras that no test installs: what they bring is taken at the version that was tried."""


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    extras = PROJECT["optional-dependencies"]
    needed = [*PROJECT["dependencies"], *(text for name in extras if name not in UNTESTED for text in extras[name])]
    for dependency in map(Requirement, needed):
        (lower,) = (Version(bound.version) for bound in dependency.specifier if bound.operator == ">=")
        assert Version(pins[dependency.name]) == lower, dependency


def test_extras_hold_no_tools_of_development_and_all_holds_every_other() -> None:
    extras = PROJECT["optional-dependencies"]
    assert not {"dev", "test", "mutation", "docs"} & extras.keys()
    (everything,) = map(Requirement, extras["all"])
    assert everything.extras == extras.keys() - {"all"}


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda path: path.stem)
def test_workflows_pin_actions_by_commit_and_run_sessions_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    uses = re.findall(r"uses: (\S+)", text)
    assert uses
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in uses)
    named = re.findall(r"nox --sessions (\w+)|session: \[([\w, ]+)\]", text)
    sessions = {name for pair in named for part in pair for name in part.split(", ") if name}
    defined = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE))
    assert sessions
    assert sessions <= defined


def test_public_names_import_alone() -> None:
    names = [name for name in refusion_lit.__all__ if name != "__version__"]
    for name in names:
        assert getattr(refusion_lit, name).__name__ == name
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in names)
    light = "import sys, refusion_lit; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", light], check=True)
