"""Takes the pictures of the pages that commands make: a report, a trace, and the server's chat.

It needs selenium, chromium and chromedriver, and replaces the pictures in docs/img.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

REPOSITORY = Path(__file__).parents[1]
IMAGES = REPOSITORY / "docs" / "img"
MODEL = REPOSITORY / "tests" / "goldens" / "models" / "additions-mid"
PROMPT = "12+34,56+78,47+85>"
PORT = 8731
TO_THE_MIDDLE = """
const slider = document.getElementById("slider");
slider.value = Math.ceil(slider.max / 2);
slider.dispatchEvent(new Event("input"));
"""
ASK = """
document.getElementById("text").value = %s;
document.getElementById("form").requestSubmit();
"""

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

sys.path.append(str(REPOSITORY / "tests"))


def command(*args: str) -> list[str]:
    """Return a command of the package for this interpreter."""
    return [sys.executable, "-m", "refusion_lit.cli", *args]


def take(chrome: Chrome, address: str, name: str, width: int, height: int, script: str = "") -> None:
    """Open a page, run a script, and keep a picture of the top of it."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    chrome.get(address)
    chrome.execute_script(script)
    time.sleep(3)
    chrome.save_screenshot(str(IMAGES / f"{name}.png"))


def wait_until_ready(address: str) -> None:
    """Wait until a server has run its model once."""
    for _ in range(120):
        try:
            urllib.request.urlopen(f"{address}/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(1)
        else:
            return
    raise SystemExit(f"{address} is not ready after two minutes")


def main(model: str) -> None:
    """Make the three pages and take their pictures."""
    from support.browser import start

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        config = str(REPOSITORY / "configs" / "ablation.yaml")
        tested = ["--config", config, "--ckpt_path", model, "--runs_dir", folder, "--run_version", "first"]
        subprocess.run(command("test", *tested), check=True)
        trace = work / "trace.html"
        subprocess.run(command("trace", "--ckpt_path", model, "--prompt", PROMPT, "--output", str(trace)), check=True)
        address = f"http://127.0.0.1:{PORT}"
        server = subprocess.Popen(command("serve", "--ckpt_path", model, "--port", str(PORT)), env=os.environ)
        try:
            wait_until_ready(address)
            for chrome in start(work / "profile"):
                chrome.delete_network_conditions()
                take(chrome, (work / "ablation" / "first" / "report" / "report.html").as_uri(), "report", 1200, 720)
                take(chrome, trace.as_uri(), "trace", 900, 720, TO_THE_MIDDLE)
                take(chrome, address, "chat", 900, 520, ASK % repr(PROMPT))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=str(MODEL), help="a model of the quickstart's sums")
    main(parser.parse_args().model)
