"""Training objectives: how responses are corrupted, and the loss. One file each."""

from refusion_lit.families.autoregressive.objective import Autoregressive
from refusion_lit.families.block_diffusion.diffusion_forcing import DiffusionForcing
from refusion_lit.families.block_diffusion.objective import BlockMasked, EditableBlockMasked
from refusion_lit.families.card.objective import SoftTail
from refusion_lit.families.llada.objective import R2FT, Masked
from refusion_lit.families.set_diffusion.objective import StaggeredSets
from refusion_lit.families.speculative.objective import GatedDraft
from refusion_lit.families.wedlm.objective import DualStream
from refusion_lit.learning.objective import Objective
from refusion_lit.policy.bounds import BlockBound, MaskedBound, SlotBound
from refusion_lit.policy.likelihood import LeftToRight, Likelihood, MeanField, NextToken
from refusion_lit.policy.objective import GroupPolicy
from refusion_lit.policy.reward import Reward
from refusion_lit.policy.rounds import Rounds
from refusion_lit.refusion.objective import Hybrid
from refusion_lit.refusion.serial import SerialHybrid
from refusion_lit.refusion.zarya import Zarya

__all__ = [
    "R2FT",
    "Autoregressive",
    "BlockBound",
    "BlockMasked",
    "DiffusionForcing",
    "DualStream",
    "EditableBlockMasked",
    "GatedDraft",
    "GroupPolicy",
    "Hybrid",
    "LeftToRight",
    "Likelihood",
    "Masked",
    "MaskedBound",
    "MeanField",
    "NextToken",
    "Objective",
    "Reward",
    "Rounds",
    "SerialHybrid",
    "SlotBound",
    "SoftTail",
    "StaggeredSets",
    "Zarya",
]
