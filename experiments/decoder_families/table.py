"""Make table.md from results.json: every decoder on every model, and tokens per second by batch size.

usage: python experiments/decoder_families/table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TRAINED_FOR = {
    "hybrid": ("refusion",),
    "autoregressive": ("autoregressive",),
    "masked": ("llada", "fast_dllm", "fast_dllm_dual"),
    "block": ("block_diffusion",),
}


def batch_size_of(row: dict[str, Any]) -> int:
    """Return a point's batch size; in the committed results it has its former name."""
    return row.get("model.decoding.batch_size", row.get("model.decoding.max_batch_size"))


def main() -> None:
    """Write the table."""
    rows = json.loads((HERE / "results.json").read_text(encoding="utf-8"))["rows"]
    lines = [
        "| model | decoder | score | tokens/forward | positions/token | tokens/s, batch 1 | batch 4 | batch 16 |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for model, own in TRAINED_FOR.items():
        of_model = [row for row in rows if f"_{model}_" in row["ckpt_path"]]
        for decoder in dict.fromkeys(row["decoder"] for row in of_model):
            by_size = {batch_size_of(row): row for row in of_model if row["decoder"] == decoder}
            first = by_size[1]
            speeds = " | ".join(f"{by_size[size]['tokens_per_second']:.0f}" for size in (1, 4, 16))
            mark = "" if decoder in own else " *"
            lines.append(
                f"| {model} | `{decoder}`{mark} | {first['score']:.3f} | {first['tokens_per_forward']:.2f} | "
                f"{first['positions_per_token']:.1f} | {speeds} |"
            )
    lines += [
        "",
        "\\* the model was not trained for this decoder. Score and tokens/forward are the same at every batch size.",
    ]
    same = {(r["ckpt_path"], r["decoder"]): set() for r in rows}
    for row in rows:
        same[row["ckpt_path"], row["decoder"]].add((row["score"], row["num_forwards"]))
    assert all(len(values) == 1 for values in same.values()), "a batch size changed a text"
    (HERE / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
