"""Training objectives: how responses are corrupted, and the loss. One file each."""

from refusion_lit.objectives.autoregressive import Autoregressive
from refusion_lit.objectives.base import Objective
from refusion_lit.objectives.block import BlockMasked
from refusion_lit.objectives.diffusion_forcing import DiffusionForcing
from refusion_lit.objectives.dual_stream import DualStream
from refusion_lit.objectives.editable import EditableBlockMasked
from refusion_lit.objectives.gated_draft import GatedDraft
from refusion_lit.objectives.hybrid import Hybrid
from refusion_lit.objectives.masked import Masked
from refusion_lit.objectives.r2ft import R2FT
from refusion_lit.objectives.soft_tail import SoftTail
from refusion_lit.objectives.staggered_sets import StaggeredSets

__all__ = [
    "R2FT",
    "Autoregressive",
    "BlockMasked",
    "DiffusionForcing",
    "DualStream",
    "EditableBlockMasked",
    "GatedDraft",
    "Hybrid",
    "Masked",
    "Objective",
    "SoftTail",
    "StaggeredSets",
]
