"""Training objectives: how responses are corrupted, and the loss. One file each."""

from refusion_lit.contrib.card import SoftTail
from refusion_lit.contrib.d2f import DiffusionForcing
from refusion_lit.contrib.rl.objective import GroupPolicy
from refusion_lit.contrib.set_diffusion import StaggeredSets
from refusion_lit.families.autoregressive.objective import Autoregressive
from refusion_lit.families.block_diffusion.objective import BlockMasked, EditableBlockMasked
from refusion_lit.families.llada.objective import R2FT, Masked
from refusion_lit.families.speculative.objective import GatedDraft
from refusion_lit.families.wedlm import DualStream
from refusion_lit.families.zarya import Zarya
from refusion_lit.learning.objective import Objective
from refusion_lit.refusion.objective import Hybrid
from refusion_lit.refusion.windows import MaskWindows

__all__ = [
    "R2FT",
    "Autoregressive",
    "BlockMasked",
    "DiffusionForcing",
    "DualStream",
    "EditableBlockMasked",
    "GatedDraft",
    "GroupPolicy",
    "Hybrid",
    "MaskWindows",
    "Masked",
    "Objective",
    "SoftTail",
    "StaggeredSets",
    "Zarya",
]
