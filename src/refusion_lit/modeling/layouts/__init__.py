"""Layouts of published checkpoints, one file per model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from refusion_lit.modeling.layouts.base import Layout
from refusion_lit.modeling.layouts.dream import DREAM
from refusion_lit.modeling.layouts.fast_dllm_v2 import FAST_DLLM_V2
from refusion_lit.modeling.layouts.llada import LLADA
from refusion_lit.modeling.layouts.open_dllm import OPEN_DLLM
from refusion_lit.modeling.layouts.sdar import SDAR
from refusion_lit.modeling.layouts.wedlm import WEDLM
from refusion_lit.modeling.layouts.zarya import ZARYA
from refusion_lit.utils.require import require_choice

LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout for layout in (LLADA, DREAM, FAST_DLLM_V2, SDAR, WEDLM, OPEN_DLLM, ZARYA)
}
"""Published layouts by name. Others load where transformers knows their architecture."""


def layout_named(name: str, option: str) -> Layout:
    """Return a layout by its name.

    Raises:
        ValueError: If there is none of that name.
    """
    require_choice(option, name, tuple(LAYOUTS))
    return LAYOUTS[name]


def layout_of(values: Mapping[str, Any], name: str | None = None) -> Layout | None:
    """Return the layout of a published config; ``None`` if the config is transformers' own.

    Args:
        values: The options in ``config.json``.
        name: A layout's name, which overrides what the config says.

    Raises:
        ValueError: If there is no layout of that name, or the config is another family's.
    """
    found = next((layout for layout in LAYOUTS.values() if layout.model_type == values.get("model_type")), None)
    if name is None:
        return found
    named = layout_named(name, "layout")
    if found is not named and values.get("model_type") != named.base:
        raise ValueError(
            f"layout: expected {found.name if found else 'none'} for model_type {values.get('model_type')!r}, got "
            f"{name!r}; leave the layout out."
        )
    return named


def supported_layouts() -> str:
    """Return the supported layouts in words, for messages."""
    return ", ".join(f"{layout.name} ({layout.family})" for layout in LAYOUTS.values())
