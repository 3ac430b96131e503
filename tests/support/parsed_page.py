"""An HTML page as its parser sees it: what text of a model could have turned into markup shows up here."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

_RUNS_OR_LOADS = (
    "script", "iframe", "object", "embed", "link", "base", "form", "img", "image",
    "foreignobject", "animate", "set",
)  # fmt: skip


class ParsedPage(HTMLParser):
    """A parsed page.

    Attributes:
        markup: Start tags with their attributes, end tags and comments, in order.
        texts: Pairs of the latest start tag and a text after it, white space alone excepted.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.markup: list[tuple[str, Any]] = []
        self.texts: list[tuple[str | None, str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.markup.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.markup.append((tag, None))

    def handle_comment(self, data: str) -> None:
        self.markup.append(("comment", data))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.lasttag, data))

    @property
    def elements(self) -> list[tuple[str, dict[str, str | None]]]:
        return [(tag, attributes) for tag, attributes in self.markup if isinstance(attributes, dict)]

    @property
    def text(self) -> str:
        return "".join(data for _, data in self.texts)

    def contents(self, tag: str) -> list[str]:
        """Return the texts of the elements with a tag."""
        return [data for lasttag, data in self.texts if lasttag == tag]

    @property
    def policy(self) -> str:
        """The content security policy."""
        [content] = [values["content"] for tag, values in self.elements if tag == "meta" and "http-equiv" in values]
        return content or ""

    @property
    def unsafe(self) -> list[str]:
        """Elements and attributes that run code or load anything."""
        tags = [tag for tag, _ in self.elements if tag in _RUNS_OR_LOADS]
        for tag, attributes in self.elements:
            for name, value in attributes.items():
                loads = name in ("src", "href", "xlink:href", "srcset", "action", "data")
                if name.startswith("on") or (loads and not (value or "").startswith("#")):
                    tags.append(f"{tag} {name}={value}")
        return tags
