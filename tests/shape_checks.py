"""Checks annotated shapes and types of the package while tests run; jaxtyping's pytest plugin applies it."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an integer is a number
