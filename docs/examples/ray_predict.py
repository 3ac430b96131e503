"""Decode a large file of prompts by actors of Ray Data: resumable by id, in order, and a killed actor loses nothing.

usage: pip install -c constraints.txt '.[ray]' && python ray_predict.py CKPT_PATH PROMPTS.jsonl OUTPUT [--num_actors N]

Each line of the file has a `prompt` and an `id`, a number that grows from line to line. To resume, run the same command
again: what is in OUTPUT/parts is not decoded again. OUTPUT/answers has all answers, sorted by id.
On a cluster, all paths must be on storage that its machines share.
"""

from pathlib import Path
from typing import Any

import ray
from jsonargparse import auto_cli
from ray.data.checkpoint import CheckpointConfig

import refusion_lit


class Answers:
    """An actor: holds a model, and answers batches of prompts."""

    def __init__(self, ckpt_path: str) -> None:
        self.model = refusion_lit.load(ckpt_path)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with its answers."""
        ids = [str(name) for name in batch["id"]]
        rows = self.model.generate(list(map(str, batch["prompt"])), ids=ids, max_new_tokens=64, batch_size=16)
        return batch | {"text": [row.text for row in rows], "forwards": [row.num_forwards for row in rows]}


def answer(
    ckpt_path: str, prompts: str, output: Path, num_actors: int, actor: type[Answers] = Answers, batch_size: int = 64
) -> None:
    """Answer all prompts that have no answer in the output directory yet, and sort the answers."""
    context = ray.data.DataContext.get_current()
    done = output / "done"
    done.mkdir(parents=True, exist_ok=True)
    # Ray notes the ids of each part that it has written, and leaves them out when it reads the prompts again.
    context.checkpoint_config = CheckpointConfig("id", str(done), delete_checkpoint_on_success=False)
    asked = ray.data.read_json(prompts)
    pool = ray.data.ActorPoolStrategy(size=num_actors)  # Ray replaces a killed actor and repeats its batch
    given: dict[str, Any] = {"fn_constructor_args": [ckpt_path], "compute": pool, "batch_size": batch_size}
    answers = asked.map_batches(actor, num_cpus=1, **given)  # num_gpus=1 in place of it: an actor on each GPU
    answers.write_json(str(output / "parts"))
    context.checkpoint_config = None
    answers = ray.data.read_json(str(output / "parts")).sort("id").repartition(1)
    answers.write_json(str(output / "answers"), mode="overwrite")


def main(ckpt_path: str, prompts: str, output: Path, num_actors: int = 2) -> None:
    """Answer all prompts of a file by actors of Ray Data.

    Args:
        ckpt_path: A run, a checkpoint, a directory or a hub id.
        prompts: The JSONL file of prompts.
        output: The directory of the answers.
        num_actors: Number of actors; an actor takes a core, and reading and writing need one more.
    """
    ray.init()  # `ray start --num-cpus` sets the number of cores
    answer(ckpt_path, prompts, output.resolve(), num_actors)


if __name__ == "__main__":
    auto_cli(main)
