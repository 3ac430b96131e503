"""Measurements on trained models that are not scores."""

from refusion_lit.analysis.dependency import DependencyCurve, dependency_curve

__all__ = ["DependencyCurve", "dependency_curve"]
