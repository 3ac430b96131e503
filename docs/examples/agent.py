"""An agent: a model that calls two functions in a loop, with OpenAI's client and a server of `refusion-lit serve`.

usage: pip install openai && python agent.py [--url http://127.0.0.1:8000/v1] [--model NAME] [--turns 10]

Every turn asks a question. The model must call a function (`tool_choice="required"`), whose result it gets, and then
answers in words. The schemas of the arguments are kept by construction, so that every call parses, also from a model
that never saw a tool, or from a decoder in any order. `tools.jinja` is a chat template with tools for such models.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import openai

CITIES = {"Rome": "sunny", "Paris": "rain", "Oslo": "snow"}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return CITIES[city]


def multiply(a: int, b: int) -> str:
    """Return the product of two numbers."""
    return str(a * b)


FUNCTIONS = {"get_weather": get_weather, "multiply": multiply}
PROPERTIES: dict[str, Any] = {
    "get_weather": {"city": {"type": "string", "enum": [*CITIES]}},
    "multiply": {"a": NUMBER, "b": NUMBER},
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": function.__doc__,
            "parameters": {"type": "object", "properties": PROPERTIES[name], "required": [*PROPERTIES[name]]},
        },
    }
    for name, function in FUNCTIONS.items()
]
QUESTIONS = ("How is the weather in Rome?", "What is 12 times 34?", "Is it cold in Oslo?", "How much is 9 times 8?")


def run(client: openai.OpenAI, model: str, num_turns: int) -> list[Any]:
    """Return the conversation after a number of turns."""
    options: dict[str, Any] = {"model": model, "tools": TOOLS, "temperature": 0}
    messages: list[Any] = []
    for turn in range(num_turns):
        question = QUESTIONS[turn % len(QUESTIONS)]
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(
            messages=messages, tool_choice="required", parallel_tool_calls=False, max_tokens=80, **options
        )
        [call] = answer.choices[0].message.tool_calls
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        answer = client.chat.completions.create(messages=messages, tool_choice="none", max_tokens=40, **options)
        text = answer.choices[0].message.content
        messages.append({"role": "assistant", "content": text})
        sys.stdout.write(f"{question}\n  {call.function.name}({call.function.arguments}) -> {result}\n  {text}\n")
    return messages


def main() -> None:
    """Talk to a server."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default=None, help="by default, the server's")
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    with openai.OpenAI(base_url=options.url, api_key="none") as client:
        model = options.model or client.models.list().data[0].id
        run(client, model, options.turns)


if __name__ == "__main__":
    main()
