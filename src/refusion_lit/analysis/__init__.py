"""Analyses of trained models beyond scores."""

from refusion_lit.analysis.dependency import DependencyCurve, dependency_curve

__all__ = ["DependencyCurve", "dependency_curve"]
