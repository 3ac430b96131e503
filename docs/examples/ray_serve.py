"""Replicas of the server under Ray Serve: one address, each request goes to one of them.

usage: pip install -c constraints.txt '.[ray,serve]' && python ray_serve.py CKPT_PATH [--num_replicas N] [--port PORT]

A replica is all of `refusion-lit serve`: queue, limits, streams, cancelled requests. An answer depends on its request
alone, so it does not matter which replica gives it. `/metrics` and `/health` describe the replica that answers; Ray's
metrics cover all replicas. To serve other machines, set REFUSION_LIT_API_KEY where Ray is started, and change the host.
"""

import os
from pathlib import Path

from fastapi import FastAPI
from jsonargparse import auto_cli
from ray import serve

import refusion_lit
from refusion_lit.serving import Limits
from refusion_lit.serving.app import API_KEY, build_app
from refusion_lit.serving.service import Service
from refusion_lit.serving.worker import Worker
from refusion_lit.types import DecodingOptions, SamplingParams


def application(ckpt_path: str, num_replicas: int) -> serve.Application:
    """Return what `serve.run` runs."""

    def build() -> FastAPI:
        """Load the model in a replica's process."""
        model = refusion_lit.load(ckpt_path)
        options = DecodingOptions(batch_size=16)
        worker = Worker(model, model.default_decoder, SamplingParams(max_new_tokens=256), options, Limits())
        return build_app(Service(worker, Path(ckpt_path).name), key=os.environ.get(API_KEY) or None)

    replica = serve.deployment(
        serve.ingress(build)(),
        name="refusion-lit",
        num_replicas=num_replicas,
        max_ongoing_requests=80,  # rows and queue of a replica
        ray_actor_options={"num_cpus": 1},  # num_gpus=1 for a replica on each GPU
    )
    return replica.bind()


def main(ckpt_path: str, num_replicas: int = 2, port: int = 8000) -> None:
    """Serve replicas of a model under Ray Serve.

    Args:
        ckpt_path: A run, a checkpoint, a directory or a hub id.
        num_replicas: Number of replicas, each with a core.
        port: The port to listen on.
    """
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(application(ckpt_path, num_replicas), blocking=True)


if __name__ == "__main__":
    auto_cli(main)
