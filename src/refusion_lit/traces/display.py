"""What a trace shows beside its numbers: the model's text made safe, and what the phases of a decode do.

A decoder names the phase of each forward; ``a+b`` stands for one forward with two.
"""

from __future__ import annotations

import unicodedata

_SYMBOLS = {"\n": "↵", "\t": "→", "\x7f": "␡"}
# Control and format characters (which include text direction), lone surrogates, line and paragraph separators.
_REPLACED_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
_EXPLANATIONS = {
    "prefill": "reads the prompt and predicts the first token",
    "next_token": "predicts the next token from left to right",
    "plan": "drafts the first tokens of all masked slots, to choose the slots that are filled next",
    "verify": "scores the drafted tokens from left to right; those that are certain enough are accepted",
    "draft": "drafts the tokens after the accepted ones",
    "recompute": "recomputes the keys and values of the filled slots, which then see each other",
    "propose": "drafts the missing tokens of the chosen slots",
    "infill_propose": "drafts the missing tokens of the chosen slots",
    "infill_verify": "scores the drafts inside the chosen slots from left to right; those that are certain enough stay",
    "infill_autoregressive": "predicts the next token of each chosen slot, in all slots at once",
    "denoise": "predicts all masked tokens that are open; the most certain ones are accepted",
    "edit": "reads a block without masks again, and replaces tokens where the model is sure of another one",
    "refresh": "computes the whole text to renew the cache, and accepts the most certain tokens of the block",
    "store": "adds the finished block to the cache",
}


def visible(text: str) -> str:
    """Replace every control character by one visible character."""
    return "".join(_visible(character) for character in text)


def visible_lines(text: str) -> str:
    """Replace every control character except newlines by one visible character."""
    return "\n".join(map(visible, text.split("\n")))


def _visible(character: str) -> str:
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    if character < " ":
        return chr(0x2400 + ord(character))  # the block "Control Pictures"
    replaced = unicodedata.category(character) in _REPLACED_CATEGORIES
    return "\N{REPLACEMENT CHARACTER}" if replaced else character


def explain(phase: str) -> str:
    """Return in one sentence what the forwards of a phase do; empty for an unknown phase."""
    parts = [_EXPLANATIONS.get(part, "") for part in phase.split("+")]
    return "; it also ".join(parts) if all(parts) else ""
