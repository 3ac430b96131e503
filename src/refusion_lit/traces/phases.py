"""What the phases of a trace are: a decoder names the phase of each forward, ``a+b`` for one forward with two."""

from __future__ import annotations

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


def explain(phase: str) -> str:
    """Return in one sentence what the forwards of a phase do; empty for an unknown phase."""
    parts = [_EXPLANATIONS.get(part, "") for part in phase.split("+")]
    return "; it also ".join(parts) if all(parts) else ""
