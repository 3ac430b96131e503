"""SmolLM2-135M in llama.cpp and here: tokens per second of one prompt at a time on a CPU.

usage: pip install xllamacpp gguf
       python experiments/lossless/prepare.py fetch
       python -m benchmarks.llama_cpp [--repeats 5] [--threads 1]

Both programs run the same weights: the 4-bit file that ``fetch`` downloads, and files with its values in 8 bits and in
float32, which this program writes. Programs and weights take turns, and a rate counts the whole call, prompt included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from benchmarks.common import ROOT, Work, interleaved, write
from jsonargparse import auto_cli

import refusion_lit
from refusion_lit.decoding import Autoregressive, Decoder, SelfSpeculative
from refusion_lit.text_model import TextModel

MODEL = ROOT / "runs" / "smollm2"
DRAFTER = ROOT / "experiments" / "lossless" / "drafter"
QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "What is the difference between a list and a tuple in Python?",
    "Natalia sold clips to 48 of her friends in April, and half as many in May. How many did she sell in all?",
)
NUM_TOKENS = 96


def write_gguf(source: Path, target: Path, kind: str) -> None:
    """Write the weights of a GGUF file in another type.

    Args:
        source: The file.
        target: The new file; kept if it exists.
        kind: ``F32`` or ``Q8_0``; vectors, such as the weights of norms, stay in float32.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
    from gguf.quants import dequantize, quantize

    if target.exists():
        return
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    rewritten = {"general.architecture", "general.file_type", "general.quantization_version"}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in rewritten:
            writer.add_key_value(name, field.contents(), *field.types[:2])
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype("float32")
        if kind == "F32" or values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            to = GGMLQuantizationType[kind]
            writer.add_tensor(tensor.name, quantize(values, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp(path: Path, prompts: Sequence[str], threads: int) -> Work:
    """Return the work of llama.cpp's greedy decoding of a GGUF file, one prompt after the other."""
    import xllamacpp  # pyright: ignore[reportMissingImports] - installed for this benchmark alone

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.verbosity = 1024, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    options = {"max_tokens": NUM_TOKENS, "temperature": 0, "cache_prompt": False}

    def run() -> dict[str, Any]:
        answers = [server.handle_completions({"prompt": prompt, **options}) for prompt in prompts]
        counts = [answer["usage"]["completion_tokens"] for answer in answers]
        texts = [answer["choices"][0]["text"] for answer in answers]
        return {"num_tokens": sum(counts), "num_forwards": sum(counts), "texts": texts}

    return Work(run)


def ours(model: TextModel, decoder: Decoder, prompts: Sequence[str]) -> Work:
    """Return the work of one of our decoders, one prompt after the other."""

    def run() -> dict[str, Any]:
        rows = [model.generate([prompt], decoder=decoder, max_new_tokens=NUM_TOKENS)[0] for prompt in prompts]
        return {
            "num_tokens": sum(row.num_tokens for row in rows),
            "num_forwards": sum(row.num_forwards for row in rows),
            "texts": [row.text for row in rows],
        }

    return Work(run)


def main(repeats: int = 5, threads: int = 1, output: str | None = None) -> None:
    """Measure llama.cpp with three types of weights and two decoders of ours in turns.

    Args:
        repeats: Rounds of the interleaved timing.
        threads: Threads of both programs.
        output: Where to write the JSON.
    """
    torch.set_num_threads(threads)
    started = time.perf_counter()
    (stored,) = MODEL.rglob("*.gguf")
    files = {"F32": MODEL / "F32.gguf.tmp", "Q8_0": MODEL / "Q8_0.gguf.tmp", "Q4_1": stored}
    for kind in ("F32", "Q8_0"):
        write_gguf(stored, files[kind], kind)
    plain = refusion_lit.load(MODEL / "base", dtype="float32")
    drafting = refusion_lit.load(MODEL / "base", dtype="float32", draft=DRAFTER)
    prompts = [str(plain.tokenizer.decode(plain.encode(question), skip_special_tokens=False)) for question in QUESTIONS]
    works = {f"llama.cpp {kind}": llama_cpp(path, prompts, threads) for kind, path in files.items()}
    works["Autoregressive float32"] = ours(plain, Autoregressive(), QUESTIONS)
    works["SelfSpeculative float32"] = ours(drafting, SelfSpeculative(), QUESTIONS)
    interleaved(works, repeats)
    runs = {name: work.summary() for name, work in works.items()}
    expected = runs["llama.cpp F32"].pop("texts")
    for run in runs.values():
        run["num_texts_as_llama_cpp_F32"] = sum(map(str.__eq__, run.pop("texts", expected), expected))
    for name, run in runs.items():
        print(f"{name:26} {run['tokens_per_second']:7} tokens/s", flush=True)
    config = {
        "repeats": repeats, "threads": threads, "num_tokens": NUM_TOKENS, "questions": QUESTIONS,
        "xllamacpp": version("xllamacpp"), "model": stored.name,
    }  # fmt: skip
    write("llama_cpp", config, {"runs": runs}, output=output, seconds=time.perf_counter() - started, seed=0)


if __name__ == "__main__":
    auto_cli(main)
