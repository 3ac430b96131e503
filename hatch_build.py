"""Metadata that depends on where a release is built: addresses of the project, and a readme with absolute links.

The sources name no address, so a copy under another one publishes its own. ``REPOSITORY_URL`` gives it, as
``.github/workflows/release.yml`` does. Without it the links of the readme stay relative, and only the paper is named.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A Markdown link or picture whose target is a path in the repository, with its anchor.
RELATIVE_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<target>[^)\s]+)\)")


def absolute(readme: str, repository: str, tag: str) -> str:
    """Replace the relative links of a readme by addresses of files at a tag; pictures get those of the plain files."""

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match["picture"] else "blob"
        return f"{match['picture']}[{match['text']}]({repository}/{kind}/{tag}/{match['target']})"

    return RELATIVE_LINK.sub(link, readme)


def urls(repository: str) -> dict[str, str]:
    """Return the addresses that the project page shows; ``DOCS_URL`` names another place of the documentation."""
    if not repository:
        return {"Paper": "https://arxiv.org/abs/2512.13586"}
    return {
        "Homepage": repository,
        "Documentation": os.environ.get("DOCS_URL") or f"{repository}/blob/main/docs/index.md",
        "Source": repository,
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Paper": "https://arxiv.org/abs/2512.13586",
    }


class CustomMetadataHook(MetadataHookInterface):
    """Fills the fields ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write both fields; called by hatchling."""
        root, repository = Path(self.root), os.environ.get("REPOSITORY_URL", "").rstrip("/")
        text = (root / "README.md").read_text(encoding="utf-8")
        version = re.search(
            r'__version__ = "(.+)"', (root / "src" / "refusion_lit" / "version.py").read_text(encoding="utf-8")
        )
        if repository and version:
            text = absolute(text, repository, f"v{version[1]}")
            text = re.sub("git clone REPOSITORY (.*?) *# REPOSITORY:.*", rf"git clone {repository} \1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(repository)
