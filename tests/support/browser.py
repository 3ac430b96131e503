"""Pages in headless Chromium, offline."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
else:
    Chrome = Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
without_browser = pytest.mark.skipif(
    None in (CHROMIUM, DRIVER), reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)"
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)

Show = Callable[[str], Chrome]


def start(profile: Path) -> Iterator[Chrome]:
    """Yield a browser that cannot reach any network, and end it afterwards."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options, ChromeService(DRIVER))
    driver.set_network_conditions(offline=True, latency=0, throughput=0)
    yield driver
    driver.quit()


def show_page(chrome: Chrome, path: Path) -> Chrome:
    """Open a page and check that it loads nothing and logs nothing to the console."""
    resize(chrome, 1200)
    chrome.get(path.as_uri())
    assert chrome.get_log("browser") == []
    assert js(chrome, "performance.getEntriesByType('resource').length") == 0
    return chrome


def js(driver: Chrome, expression: str) -> Any:
    return driver.execute_script(f"return {expression}")


def press(driver: Chrome, key: str, *, shift: bool = False) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    actions = ActionChains(driver, duration=0)
    if shift:
        actions.key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT).perform()
    else:
        actions.send_keys(key).perform()


def resize(driver: Chrome, width: int, scheme: str = "light") -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


Colour = tuple[int, int, int]


def contrast(first: Colour, second: Colour) -> float:
    """Return the contrast of two colours as WCAG 2 defines it, from 1 to 21."""

    def luminance(colour: Colour) -> float:
        """Return the relative luminance, plus the 0.05 that WCAG adds for light on the screen."""
        linear = [v / 255 / 12.92 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    low, high = sorted(map(luminance, (first, second)))
    return high / low


def colours(driver: Chrome, selector: str, name: str) -> list[Colour]:
    """Return a computed colour of every element that a selector finds."""
    values = js(driver, f"[...document.querySelectorAll('{selector}')].map(e => getComputedStyle(e)['{name}'])")
    return [tuple(int(part) for part in re.findall(r"[0-9]+", value)[:3]) for value in values]  # type: ignore[misc]
