"""Settings of the whole suite: no network, one thread, no deadlines."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

import torch
from hypothesis import settings

settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
torch.set_num_threads(1)
