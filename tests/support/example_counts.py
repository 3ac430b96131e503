"""Numbers of hypothesis examples for property tests that decode or train."""

from __future__ import annotations

from hypothesis import settings

THOROUGH = "thorough"
"""Name of the profile that runs all examples: ``nox -s tests -- --hypothesis-profile=thorough``."""


def examples(num: int) -> int:
    """Return the number of examples for a test whose examples take at least 20 ms.

    Args:
        num: Number under the profile ``thorough``. Other profiles run a sixth, but at least 3.
    """
    return num if settings.get_current_profile_name() == THOROUGH else max(num // 6, 3)
