"""Set diffusion: causal attention, masks that do not see each other, tokens cached one by one.

The decoder ``SetDiffusion`` and the objective ``StaggeredSets``.
"""
