"""Task examples, checked when they are read, and encoded as token ids for training."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from refusion_lit.data.conversations import encode_prompt, encode_response
from refusion_lit.tasks.base import Example, Split, Task
from refusion_lit.utils.require import require


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """An example's token ids."""

    id: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def load_examples(task: Task, split: Split) -> Sequence[Example]:
    """Return a split's examples after checking their types.

    Raises:
        ValueError: If the task returns no sequence of examples.
    """
    examples = task.examples(split)
    name = f"{type(task).__name__}.examples"
    fix = "return a list of Example"
    is_sequence = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    require(is_sequence, name, "a sequence of examples", type(examples).__name__, fix)
    if len(examples):
        first = examples[0]
        is_example = isinstance(first, Example)
        require(is_example, name, "a sequence of refusion_lit.tasks.Example", f"one of {type(first).__name__}", fix)
        texts = (first.id, first.query, first.response)
        are_texts = all(isinstance(text, str) for text in texts)
        require(are_texts, name, "examples whose id, query and response are texts", texts, "convert them with str")
    return examples


def encode_example(
    tokenizer: PreTrainedTokenizerBase, example: Example, prompt_template: str = "{query}"
) -> EncodedExample:
    """Encode an example as prompt and response, which ends as in the chat template, or with the EOS token.

    Raises:
        ValueError: If the response is empty or the example cannot be encoded; the message names the example.
    """
    fix = "remove it, or set malformed: skip in the task"
    require(bool(example.response or example.answer), f"example {example.id}", "a response", example.response, fix)
    try:
        context = (example.query, prompt_template, example.messages, example.meta.get("tools", ()))
        prompt = encode_prompt(tokenizer, *context)
        response = encode_response(tokenizer, example.response, prompt, *context, answer=example.answer)
    except ValueError as error:
        raise ValueError(f"example {example.id}: {error}") from error
    return EncodedExample(example.id, array("i", prompt), array("i", response))  # 4 bytes per token
