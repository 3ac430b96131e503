"""The agent of the documentation: its calls parse, and its calls and texts are those that Python decodes alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs llguidance: pip install --group test")
pytest.importorskip("fastapi", reason="needs fastapi: pip install --group test")
pytest.importorskip("openai", reason="needs openai: pip install --group test")
pytest.importorskip("prometheus_client", reason="needs prometheus_client: pip install --group test")

import openai

from refusion_lit import load
from refusion_lit.constraints.tool_calls import CallReader, find_tool_format
from refusion_lit.decoding import Autoregressive, Decoder, ReFusion
from refusion_lit.serving.protocol import Function
from refusion_lit.text_model import TextModel
from refusion_lit.types import Prompt, SamplingParams
from support.modules import load_module
from support.servers import NAME, address, serving
from support.tiny import make_bytes_base

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def check_conversation(model: TextModel, decoder: Decoder, messages: list[Any], tools: list[Any]) -> int:
    """Decode the turns of an assistant again, alone; return the number of calls."""
    tool_format = find_tool_format(model.tokenizer.chat_template)
    assert tool_format is not None
    functions = {tool["function"]["name"]: Function(**tool["function"]).to_schema() for tool in tools}
    turns: list[dict[str, Any]] = []
    num_calls = 0
    for message in messages:
        calls = message.get("tool_calls", [])
        if message["role"] == "assistant":
            sampling = SamplingParams(max_new_tokens=80 if calls else 40)  # as the agent asks
            prompt = Prompt(token_ids=tuple(model.encode("", turns, tools if calls else [])), id="0")
            if calls:
                [prompt] = model.schemas.constrain_calls([prompt], functions, tool_format, decoder, sampling)
            [row] = model.decode([prompt], decoder, sampling).rows
            if calls:
                pieces: Any = CallReader(tool_format, functions, is_constrained=True).read(row.text, is_last=True)
                decoded = (pieces[0].name, "".join(piece.arguments for piece in pieces))
                assert decoded == (calls[0]["function"]["name"], calls[0]["function"]["arguments"])
                num_calls += 1
            else:
                assert row.text == message["content"]
        for call in calls:  # chat templates get values
            function = call["function"]
            message = message | {"content": "", "tool_calls": [
                {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
            ]}  # fmt: skip
        turns.append(message)
    return num_calls


@pytest.mark.parametrize(
    "decoder", [Autoregressive(), ReFusion(slot_size=4)], ids=lambda decoder: type(decoder).__name__
)
def test_the_turns_parse_and_equal_python(tmp_path: Path, decoder: Decoder) -> None:
    """The model is random, with the template that the documentation gives to models without tools."""
    make_bytes_base(tmp_path, mask=True, max_positions=8192)
    shutil.copy(EXAMPLES / "tools.jinja", tmp_path / "chat_template.jinja")
    model = load(tmp_path, device="cpu")
    agent = load_module(EXAMPLES / "agent.py")
    with (
        serving(model, decoder, max_prompt_tokens=8000) as server,
        openai.OpenAI(base_url=f"{address(server)}/v1", api_key="none", max_retries=0) as client,
    ):
        messages = agent.run(client, NAME, 4)
    assert check_conversation(model, decoder, messages, agent.TOOLS) == 4
