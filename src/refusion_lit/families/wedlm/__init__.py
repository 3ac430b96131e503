"""WeDLM (arXiv 2512.22737): causal attention, masks that predict themselves, a sliding window."""

from refusion_lit.families.wedlm import checkpoints  # noqa: F401 - registers the formats
