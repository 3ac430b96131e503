"""The table of results.json, every decoder on every model by batch size; `nox -s figures` writes it."""

from __future__ import annotations

from typing import Any

TRAINED_FOR = {
    "hybrid": ("refusion",),
    "autoregressive": ("autoregressive",),
    "masked": ("llada", "fast_dllm", "fast_dllm_dual", "fast_dllm_whole"),
    "block": ("block_diffusion",),
}


def read_batch_size(row: dict[str, Any]) -> int:
    """Return a point's batch size; in the committed results it has its former name."""
    former = "model.decoding.max_batch_size"
    return row[former] if former in row else row["model.decoding.batch_size"]


def table(rows: list[dict[str, Any]]) -> str:
    """Return every decoder on every model as a Markdown table.

    Raises:
        ValueError: If a decoder's score or forwards differ between batch sizes.
    """
    lines = [
        "| model | decoder | score | tokens/forward | positions/token | tokens/s, batch 1 | batch 4 | batch 16 |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for model, decoders in TRAINED_FOR.items():
        of_model = [row for row in rows if f"_{model}_" in row["ckpt_path"]]
        for decoder in dict.fromkeys(row["decoder"] for row in of_model):
            by_size = {read_batch_size(row): row for row in of_model if row["decoder"] == decoder}
            first = by_size[1]
            speeds = " | ".join(f"{by_size[size]['tokens_per_second']:.0f}" for size in (1, 4, 16))
            mark = "" if decoder in decoders else " *"
            lines.append(
                f"| {model} | `{decoder}`{mark} | {first['score']:.3f} | {first['tokens_per_forward']:.2f} | "
                f"{first['positions_per_token']:.1f} | {speeds} |"
            )
    lines += [
        "",
        "\\* the model was not trained for this decoder. Score and tokens/forward are the same at every batch size.",
        "Speeds were measured once, without an interval.",
    ]
    same = {(r["ckpt_path"], r["decoder"]): set() for r in rows}
    for row in rows:
        same[row["ckpt_path"], row["decoder"]].add((row["score"], row["num_forwards"]))
    if changed := [key for key, values in same.items() if len(values) > 1]:
        raise ValueError(f"rows: expected the same score and forwards at every batch size, got others for {changed}.")
    return "\n".join(lines)
