"""A model behind LitServe: requests that arrive together are decoded together, and each gets the answer it gets alone.

usage: pip install litserve && python litserve_server.py CKPT_PATH [--port PORT]

    curl localhost:8000/predict -H 'Content-Type: application/json' -d '{"prompt": "12+34,56+78>", "max_tokens": 32}'

`refusion-lit serve` is the server with OpenAI's API, streams, cancelled requests and JSON schemas.
"""

from collections import defaultdict
from typing import Any

import litserve
from jsonargparse import auto_cli

import refusion_lit


class Decoding(litserve.LitAPI):
    """Decodes a batch of requests with the model's own decoder."""

    def __init__(self, ckpt_path: str) -> None:
        super().__init__(max_batch_size=16, batch_timeout=0.02)
        self.ckpt_path = ckpt_path

    def setup(self, device: str) -> None:
        """Load the model."""
        self.model = refusion_lit.load(self.ckpt_path, device=device)

    def decode_request(self, request: dict[str, Any]) -> tuple[str, int]:
        """Return prompt and length limit."""
        return str(request["prompt"]), int(request.get("max_tokens", 64))

    def batch(self, inputs: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return what is decoded together."""
        return inputs

    def unbatch(self, output: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the answers one by one."""
        return output

    def predict(self, asked: list[tuple[str, int]]) -> list[dict[str, Any]]:
        """Answer a batch."""
        lengths = defaultdict(list)
        for number, (_, length) in enumerate(asked):
            lengths[length].append(number)
        answers: dict[int, dict[str, Any]] = {}
        for length, numbers in lengths.items():  # a call of `generate` has one length limit
            rows = self.model.generate([asked[number][0] for number in numbers], max_new_tokens=length)
            for number, row in zip(numbers, rows, strict=True):
                answers[number] = {"text": row.text, "tokens": row.num_tokens, "forwards": row.num_forwards}
        return [answers[number] for number in range(len(asked))]


def main(ckpt_path: str, port: int = 8000) -> None:
    """Serve a model by LitServe.

    Args:
        ckpt_path: A run, a checkpoint, a directory or a hub id.
        port: The port to listen on.
    """
    server = litserve.LitServer(Decoding(ckpt_path), accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=port, generate_client_file=False)


if __name__ == "__main__":
    auto_cli(main)
