"""``refusion-lit chat``: talk to a model and see in which order it decodes."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.live import Live
from rich.text import Text

from refusion_lit.cli.model_options import ModelParser, Setup, add_decoding_options, add_model_options, load_setup
from refusion_lit.decoding import GenerationCallback, RowState
from refusion_lit.engine.kept_cache import KeptCache
from refusion_lit.text_model import TextModel
from refusion_lit.traces.display import round_style
from refusion_lit.traces.document import Trace, record_trace, show_controls, show_controls_in_lines
from refusion_lit.traces.timeline import timeline
from refusion_lit.utils.require import require

_HELP = """\
/help     show this text
/reset    forget the conversation
/quit     leave; so do Ctrl-C at the prompt and the end of input

order: [2]12[1]+34 below an answer says that forward 2 decoded "12" and forward 1 "+34".
"""


def build_parser() -> ModelParser:
    """Return the parser of ``chat``."""
    parser = ModelParser(prog="refusion-lit chat", description="Talk to a model; /help lists its commands.")
    parser.add_argument("--ckpt_path", type=str, required=True, help="checkpoint, Hugging Face directory or hub id")
    parser.add_argument("--system", type=str | None, default=None, help="system message, if the chat template has it")
    add_decoding_options(parser, "allow_mismatch")
    add_model_options(parser, max_new_tokens=256)
    return parser


def run(args: list[str]) -> int:
    """Run the loop.

    Raises:
        ValueError: If an option or the model is wrong. An error in a line of the conversation is only printed.
    """
    options = build_parser().parse(args)
    setup = load_setup(options)
    setup.check()
    chat = Chat(setup, options.system, Console())
    if not setup.model.tokenizer.chat_template:
        fix = "leave it out; every question stands alone"
        require(not options.system, "system", "a tokenizer with a chat template", options.system, fix)
        sys.stderr.write("The tokenizer has no chat template: every question stands alone, without history.\n")
    sys.stderr.write(f"decoder: {type(setup.decoder).__name__}\n")
    for line in _lines(chat.console):
        try:
            if not chat.take(line):
                break
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
        except KeyboardInterrupt:
            sys.stderr.write("interrupted; the question is not kept\n")
    return 0


def _lines(console: Console):  # noqa: ANN202 - a generator of lines
    """Read lines until the end of input; prompt for them at a terminal only."""
    asking = sys.stdin.isatty()
    if asking:
        import readline  # noqa: F401 - editing of the line

        console.print("/help lists the commands", style="dim")
    while True:
        try:
            line = input("> ") if asking else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            if not asking:
                raise
            console.print()
            return
        if not asking and not line:
            return
        if line.strip():
            yield line.rstrip("\r\n")


class Chat:
    """A conversation.

    Args:
        setup: Model, decoder and sampling.
        system: The system message; ``None`` for none.
        console: Where answers are shown.
    """

    def __init__(self, setup: Setup, system: str | None, console: Console) -> None:
        self.model = setup.model
        self.setup = setup
        self.system = system
        self.console = console
        self.turns: list[tuple[str, str]] = []
        self._kept = KeptCache()

    def take(self, line: str) -> bool:
        """Run an input line, a command or a question; return whether the conversation continues.

        Raises:
            ValueError: If the command or question fails; the conversation is unchanged.
        """
        if not line.startswith("/"):
            self.ask(line)
            return True
        if line == "/quit":
            return False
        require(line in ("/help", "/reset"), "chat", "one of its commands", show_controls(line), "/help lists them")
        if line == "/reset":
            self.turns.clear()
        else:
            self._print(_HELP.rstrip())
        return True

    def messages(self, question: str, num_turns: int) -> list[dict[str, str]]:
        """Return the messages for the model: system message, last turns, question."""
        turns = self.turns[len(self.turns) - num_turns :]
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for asked, answered in turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*messages, {"role": "user", "content": question}]

    def ask(self, question: str) -> str:
        """Answer a question and remember both.

        Raises:
            ValueError: If it cannot be encoded, or is too long for the model.
        """
        ids = self._encode(question)
        with Live(console=self.console, auto_refresh=False, transient=True) as live:
            callbacks = [_Watch(live, self.model)] if self.console.is_terminal else []
            row, trace = record_trace(
                self.model, question, self.setup.decoder, self.setup.sampling, token_ids=ids,
                prompt_id=str(len(self.turns)), callbacks=callbacks, kept=self._kept, **vars(self.setup.decoding),
            )  # fmt: skip
        answer = row.text
        self.turns.append((question, answer))
        self._print(show_controls_in_lines(answer))
        self.console.print(order_line(trace), soft_wrap=True)
        pace = f"{row.num_tokens} tokens, {row.num_forwards} forwards, {row.seconds:.2f} s, {row.finish_reason}"
        self.console.print(pace, style="dim", highlight=False, markup=False)
        return answer

    def _encode(self, question: str) -> list[int]:
        """Return a prompt with the latest turns that fit into the context; print how many turns are left out."""
        decoder = self.setup.decoder
        context = self.model.model_for(decoder).context(in_text_order=decoder.keeps_text_order)
        room = self.setup.sampling.max_new_tokens
        num_turns = len(self.turns) if self.model.tokenizer.chat_template else 0
        kept = num_turns
        ids = self.model.encode(question, self.messages(question, kept))
        while context is not None and len(ids) + room > context and kept > 0:
            kept -= 1
            ids = self.model.encode(question, self.messages(question, kept))
        if kept < num_turns:
            self.console.print(f"{num_turns - kept} earlier turns are left out: the context is full", style="yellow")
        return ids

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Watch(GenerationCallback):
    """Shows the canvas as it fills: final text in the colour of its forward pass, dots elsewhere."""

    def __init__(self, live: Live, model: TextModel) -> None:
        self._live = live
        self._model = model

    def on_commit(self, index: int, state: RowState) -> None:  # noqa: ARG002
        text = Text()
        final = [place for place, masked in enumerate(state.is_masked) if not masked]
        for place in range(max(final, default=-1) + 1):
            if state.is_masked[place]:
                text.append("·", "dim")
            else:
                style = round_style(state.commit_rounds[place], state.num_forwards)
                text.append(show_controls(self._model.token_text(state.tokens[place])), style)
        self._live.update(text, refresh=True)


def order_line(trace: Trace) -> Text:
    """Return an answer's text; a forward pass's number stands before the tokens that it decoded."""
    text = Text("order: ", "dim")
    before = -1
    for token, number in zip(trace.token_ids, timeline(trace).final_forwards(), strict=False):
        if number != before:
            text.append(f"[{number}]", "dim")
            before = number
        text.append(show_controls(trace.piece(token)), round_style(number, trace.num_forwards) if number else "")
    return text
