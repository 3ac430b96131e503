"""Settings of the whole suite: no network, one thread, no deadlines."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings

# Started in a shell's background, Python ignores Ctrl-C, and so do the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Undo what a config's ``num_threads`` did: the models here are too small for more than one."""
    torch.set_num_threads(1)
