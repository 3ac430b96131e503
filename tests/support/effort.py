"""How many examples a test draws that decodes or trains in each of them."""

from __future__ import annotations

from hypothesis import settings

THOROUGH = "thorough"
"""Name of the profile that draws all of them: ``nox -s tests -- --hypothesis-profile=thorough``."""


def examples(num: int) -> int:
    """Return the number of examples of a test whose examples take 20 ms and more.

    Args:
        num: Number under the profile ``thorough``. Otherwise it is two fifths of it, but at least 3.
    """
    return num if settings.get_current_profile_name() == THOROUGH else max(2 * num // 5, 3)
