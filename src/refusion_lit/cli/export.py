"""``refusion-lit export``: a checkpoint becomes a Hugging Face directory."""

from __future__ import annotations

import sys

from refusion_lit.cli.parser import OneLineParser


def run(args: list[str]) -> int:
    """Write the directory.

    Raises:
        ValueError: If the checkpoint cannot be read or the directory is not empty.
    """
    parser = OneLineParser(prog="refusion-lit export", description="Write a Hugging Face directory.")
    parser.add_argument("--ckpt_path", type=str, required=True, help="checkpoint, directory or hub id to export")
    parser.add_argument("--output", type=str, required=True, help="new or empty directory")
    options = parser.parse_args(args)

    from refusion_lit.bundle import load_model
    from refusion_lit.modeling.loading import save_directory

    backbone, tokenizer, _ = load_model(options.ckpt_path)
    save_directory(backbone, tokenizer, options.output)
    sys.stdout.write(f"wrote {options.output}\n")
    return 0
