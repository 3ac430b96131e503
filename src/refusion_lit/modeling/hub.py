"""Checks of a model's source before loading: a directory must have a config, and the hub must be reachable."""

from __future__ import annotations

import json
from pathlib import Path

from refusion_lit.utils.errors import reason_of

_SECONDS = 10.0


def check_source(source: str, option: str) -> None:
    """Refuse a directory whose config cannot be read; for a hub id, try once whether the hub answers.

    If it does not answer, files are taken from the hub's local cache from then on. Otherwise the libraries would retry
    every file for a minute.

    Args:
        source: Directory or hub id.
        option: The option that named it, for the message.

    Raises:
        ValueError: If ``config.json`` is no JSON object, or the source is neither a directory nor in the cache while
            the hub cannot be reached.
    """
    config = Path(source) / "config.json"
    if config.is_file():
        try:
            values = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"{option}: {config} is not JSON ({reason_of(error)}); fetch it again.") from error
        if not isinstance(values, dict):
            raise ValueError(
                f"{option}: expected options by name in {config}, got {type(values).__name__}; fetch it again."
            )
    elif not Path(source).exists():
        _check_hub(source, option)


def _check_hub(source: str, option: str) -> None:
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError, get_session

    reason = "offline mode is on"
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=_SECONDS)
        except Exception as error:  # any error of the library's HTTP client
            constants.HF_HUB_OFFLINE, reason = True, reason_of(error)
    try:
        is_cached = not constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(source, "config.json"), str)
    except HFValidationError:
        is_cached, reason = False, "and it cannot be a hub id"
    if not is_cached:
        raise ValueError(
            f"{option}: expected a directory or a hub id, got {source!r}: there is no such directory, and the hub "
            f"cannot be asked ({reason}). Check the path, or the network."
        )
