"""All training objectives: how responses are corrupted, and the loss."""

from typing import Any

from refusion_lit.families.autoregressive.objective import Autoregressive
from refusion_lit.families.block_diffusion.objective import BlockMasked
from refusion_lit.families.block_diffusion.token_editing import EditableBlockMasked
from refusion_lit.families.idlm import Introspective
from refusion_lit.families.llada.objective import Masked
from refusion_lit.families.nemotron import CausalBlockMasked
from refusion_lit.families.speculative.block_objective import BlockDraft
from refusion_lit.families.speculative.objective import GatedDraft
from refusion_lit.families.uniform_diffusion import UniformBlock
from refusion_lit.families.wedlm import DualStream
from refusion_lit.families.zarya import Zarya
from refusion_lit.learning.objective import Objective
from refusion_lit.plugins import find_class
from refusion_lit.refusion.objective import Hybrid
from refusion_lit.refusion.windows import MaskWindows

__all__ = [
    "Autoregressive",
    "BlockDraft",
    "BlockMasked",
    "CausalBlockMasked",
    "DualStream",
    "EditableBlockMasked",
    "GatedDraft",
    "Hybrid",
    "Introspective",
    "MaskWindows",
    "Masked",
    "Objective",
    "UniformBlock",
    "Zarya",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class of a plugin
    """Return an objective from a plugin by name, such as ``SoftTail`` from :mod:`refusion_lit.contrib`."""
    return find_class(Objective, name)
