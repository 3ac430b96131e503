"""``refusion-lit import-gguf``: write the model of a GGUF file as a Hugging Face directory."""

from __future__ import annotations

import sys
from pathlib import Path

from refusion_lit.cli.export import atomic_directory
from refusion_lit.cli.parser import OneLineParser
from refusion_lit.utils.files import require_empty


def run(args: list[str]) -> int:
    """Write the model of a GGUF file.

    Raises:
        ValueError: If the file cannot be read, or the directory is not empty.
    """
    text = "Write the model of a GGUF file as a Hugging Face directory, with weights in float32."
    parser = OneLineParser(prog="refusion-lit import-gguf", description=text)
    parser.add_argument("file", type=str, help="a GGUF file of an architecture that transformers reads")
    parser.add_argument("--output", type=str, required=True, help="new or empty directory")
    options = parser.parse(args)
    output = Path(options.output)
    require_empty(output)

    from refusion_lit.modeling.loading import load_gguf

    model, tokenizer = load_gguf(options.file)
    with atomic_directory(output) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    size = sum(weight.numel() for weight in model.parameters()) / 1e6
    sys.stdout.write(f"wrote {output}: {type(model).__name__}, {size:.1f} million parameters\n")
    return 0
