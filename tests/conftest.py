"""Settings of the whole suite: no network, one thread, no deadlines, shapes of tensors checked."""

# ruff: noqa: E402 - settings come before the libraries that read them

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start, beside another worker's

# Before the libraries are imported: they hold so many objects that collecting garbage as often as by default slows the
# imports and takes a fifth of the tests' time.
gc.set_threshold(20_000, 20, 20)

import pytest
import torch
from hypothesis import settings

from support import browser
from support.example_counts import THOROUGH
from support.shape_checks import check_shapes, num_calls

check_shapes()

pytest_plugins = ["support.batches"]  # fixtures that make training batches

# Started in a shell's background, Python ignores Ctrl-C, and so do the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# CI draws the same examples in every run, so that it fails for a change and not by chance; other runs draw new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("suite", deadline=None)
settings.register_profile(THOROUGH, deadline=None)
settings.load_profile("repeatable" if os.environ.get("CI") else "suite")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where more tests are skipped than the environment allows: they would be missed by nobody."""
    most = os.environ.get("REFUSION_LIT_MAX_SKIPPED")
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if most and reporter is not None and len(reporter.stats.get("skipped", ())) > int(most):
        reporter.write_line(f"\nmore than {most} tests were skipped (REFUSION_LIT_MAX_SKIPPED)", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Start every test alike, whatever ran before: one thread, enough for models as small as these, and one seed."""
    num_calls.clear()
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)  # torch.manual_seed notes a stack for every device that is not there


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Chrome]:
    """A browser for the whole session."""
    yield from browser.start(tmp_path_factory.mktemp("profile"))


@pytest.fixture
def show(chrome: browser.Chrome, tmp_path: Path) -> browser.Show:
    """Return a function that opens a page and checks that it loads nothing and logs nothing to the console."""

    def open_page(html: str) -> browser.Chrome:
        path = tmp_path / "page.html"
        path.write_text(html, encoding="utf-8")
        return browser.show_page(chrome, path)

    return open_page
