"""The report in headless Chromium: both colour schemes, narrow windows and the plots."""

from __future__ import annotations

from pathlib import Path

import pytest

from refusion_lit.reports.write import write_report
from reports.samples import predictions, write_run, write_sweep
from support.browser import Show, colours, contrast, js, resize, show_page, without_browser

pytest.importorskip("selenium", reason="needs selenium: pip install --group test")
pytestmark = without_browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_are_readable_in_both_schemes(show: Show, tmp_path: Path, scheme: str) -> None:
    lines = predictions([1.0, 0.0, 1.0] * 4)
    run = write_run(tmp_path / "run", {"a": lines, "b": lines[:9], "c": lines[:2]}, mismatches={"b": ["why"]})
    for path in (run, write_sweep(tmp_path / "sweep")):
        page = write_report([path])[0].read_text(encoding="utf-8")
        driver = show(page)
        resize(driver, 1200, scheme)
        (background,) = colours(driver, "body", "backgroundColor")
        assert (sum(background) < 384) == (scheme == "dark")
        texts = colours(driver, "p:not(.note), h1, tbody th, td, .range, .caption, sup.mark, dt", "color")
        assert min(contrast(c, background) for c in texts) >= 4.5
        # Plots are drawn on white; a dark page inverts them as a whole.
        (effect,) = set(js(driver, "[...document.querySelectorAll('.plot')].map(p => getComputedStyle(p).filter)"))
        assert ("invert" in effect) == (scheme == "dark")
        plot_texts = colours(driver, ".plot text", "fill")
        assert min(contrast(c, (255, 255, 255)) for c in plot_texts) >= 4.5
        markers = colours(driver, ".plot .marker use", "stroke")
        assert min(contrast(c, (255, 255, 255)) for c in markers) >= 3


@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_is_wider_than_the_window(show: Show, tmp_path: Path, width: int) -> None:
    driver = show(write_report([write_sweep(tmp_path / "sweep")])[0].read_text(encoding="utf-8"))
    resize(driver, width)
    assert js(driver, "document.documentElement.scrollWidth") <= width


def test_the_mouse_finds_every_point_and_a_plot_opens_alone(chrome: object, tmp_path: Path) -> None:
    page, tradeoff, *_ = write_report([write_sweep(tmp_path / "sweep")])
    for path in (page, tradeoff):
        driver = show_page(chrome, path)
        actual = js(
            driver,
            """[...document.querySelector('.plot').querySelectorAll('.point')].map(point => {
                const box = point.getBoundingClientRect();
                scrollTo(0, box.top + scrollY - 200);
                const now = point.getBoundingClientRect();
                const top = document.elementFromPoint(now.left + now.width / 2, now.top + now.height / 2);
                return top.closest('.point').querySelector('title').textContent;
            })""",
        )
        assert len(set(actual)) == 6
        assert all(title.startswith("refusion (slot_size=") for title in actual)
