"""Runs the examples for Ray on a local cluster of two workers; a program of tests/serving/test_ray.py.

usage: python ray_program.py MODEL FOLDER
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import openai
import ray
import ray_predict
import ray_serve
from ray import serve

from refusion_lit.serving.app import LOCAL_HOSTS

BATCH = 8


def interrupt_actor(folder: Path) -> type[ray_predict.Answers]:
    """Return an actor that is killed at prompt 0 and fails at prompt 39, in the first try each.

    It fails only when the other actor has written answers. The actor writes the ids that it decodes to a file.
    """

    class Interrupted(ray_predict.Answers):
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            ids = [int(number) for number in batch["id"]]
            if 0 in ids and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if 39 in ids and not (folder / "failed").exists():
                while not list((folder / "output" / "done").glob("*.parquet")):
                    time.sleep(0.1)
                (folder / "failed").touch()
                raise RuntimeError("as an interruption")
            rows = super().__call__(batch)
            with (folder / "decoded").open("a", encoding="utf-8") as file:
                file.write("".join(f"{number}\n" for number in ids))
            return rows

    return Interrupted


def read_ids(folder: Path) -> list[int]:
    files = sorted((folder / "output" / "parts").glob("*.json"))
    return [json.loads(line)["id"] for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def predict(model: str, folder: Path) -> None:
    """Decode the prompts in two runs, of which the first one is interrupted."""
    answer = partial(
        ray_predict.answer, model, str(folder / "prompts.jsonl"), folder / "output", num_actors=2,
        actor=interrupt_actor(folder), batch_size=BATCH,
    )  # fmt: skip
    with contextlib.suppress(ray.exceptions.RayError):
        answer()
    first_run = read_ids(folder)
    (folder / "decoded").unlink(missing_ok=True)
    answer()
    second_run = [int(line) for line in (folder / "decoded").read_text(encoding="utf-8").split()]
    figures = {"first_run": first_run, "second_run": second_run}
    (folder / "interrupted.json").write_text(json.dumps(figures), encoding="utf-8")


async def ask(port: int, name: str) -> dict[str, list[str]]:
    """Ask the replicas from several clients at once, with and without a stream."""
    prompts = [f"{i}+1=" for i in range(16)]
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=120) as client:

        async def complete(text: str) -> str:
            return (await client.completions.create(model=name, prompt=text, max_tokens=24)).choices[0].text

        async def stream(text: str) -> str:
            stream = await client.completions.create(model=name, prompt=text, max_tokens=24, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*map(complete, prompts))
        return {"texts": texts, "streamed": await asyncio.gather(*map(stream, prompts))}


def serve_replicas(model: str, folder: Path) -> None:
    """Serve with two replicas; write their states and their answers to a file."""
    with socket.socket() as free:
        free.bind((LOCAL_HOSTS[0], 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": LOCAL_HOSTS[0], "port": port})
    serve.run(ray_serve.application(model, 2))
    [deployment] = serve.status().applications["default"].deployments.values()
    states = {str(getattr(state, "value", state)): count for state, count in deployment.replica_states.items()}
    answers = asyncio.run(ask(port, Path(model).name))
    (folder / "served.json").write_text(json.dumps({"replicas": states, **answers}), encoding="utf-8")


def start(num_tries: int = 4) -> None:
    """Start a local cluster; on a busy machine Ray's agents may miss a time limit of half a minute that is not ours."""
    for number in range(num_tries):
        try:
            # Logical processors: one for each of two workers, the others for reading and writing.
            ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200_000_000)
        except Exception as error:  # Ray raises no class of error for a time limit
            ray.shutdown()
            if number == num_tries - 1 or "timed out during startup" not in str(error):
                raise
        else:
            return


def main() -> None:
    """Run both examples: predictions in batches, and a server."""
    model, folder = sys.argv[1], Path(sys.argv[2])
    start()
    predict(model, folder)
    serve_replicas(model, folder)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
