"""A hook of MkDocs: the site includes the results, which stand outside docs/, and links to them resolve.

In a checkout a page of docs/ links to ``../experiments/demo/README.md``, which editors and code hosts follow. On the
site both folders share one root, so that a link loses the ``../`` or ``docs/`` that crosses between them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
INCLUDED = ("experiments/*/*", "benchmarks/results/*")
SHOWN = (".md", ".json", ".png", ".svg", ".yaml")
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>~?(?P<name>[\w.]+)</code>")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)\s#]+")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the README files of all experiments to the navigation."""
    readmes = sorted(path.relative_to(ROOT) for path in ROOT.glob("experiments/*/README.md"))
    experiments = [{readme.parent.name: readme.as_posix()} for readme in readmes]
    config.nav.append({"Results": [{"Benchmarks": "benchmarks/results/README.md"}, *experiments]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages, figures and pictures of the results to the site."""
    shown = (path for pattern in INCLUDED for path in ROOT.glob(pattern) if path.suffix in SHOWN)
    for path in sorted(shown):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_content(html: str, **_: object) -> str:
    """Show Sphinx's roles of docstrings, which editors follow, as code."""
    return ROLE.sub(lambda role: f"<code>{role['name'].removeprefix('refusion_lit.')}</code>", html)


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Rewrite the links between docs/ and the results."""
    uri = page.file.src_uri
    folder = posixpath.dirname(uri if uri.startswith(("experiments/", "benchmarks/")) else f"docs/{uri}")

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[0]))
        return posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(uri) or ".")

    return LINK.sub(on_site, markdown)
