"""Streams of text: their pieces, joined, are the final text."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from refusion_lit.data.detokenizer import Detokenizer
from refusion_lit.engine.stopping import TextStream
from refusion_lit.types import SamplingParams


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def stream_pieces(stream: TextStream, text: bytes) -> list[str]:
    return [stream.piece([*text[:length]]) for length in range(len(text) + 1)]


def test_a_response_that_ends_within_a_character_is_streamed_whole() -> None:
    text = "a€".encode()[:-1]  # cut by the length limit
    stream = TextStream(decode, SamplingParams())
    pieces = stream_pieces(stream, text)
    assert "".join(pieces) == "a", "the last character may still be completed"
    assert "".join([*pieces, stream.rest(decode([*text]))]) == decode([*text]) == "a\N{REPLACEMENT CHARACTER}"


def test_the_beginning_of_a_stop_string_is_held_back_and_told_at_the_end() -> None:
    stream = TextStream(decode, SamplingParams(stop=("END", "\n")))
    assert stream_pieces(stream, b"xEyEN") == ["", "x", "", "Ey", "", ""]
    assert stream.rest("xEyEN") == "EN"


def test_the_beginning_of_a_stop_string_is_held_back_while_its_next_character_is_half_written() -> None:
    for stop, text in (("Q€", "12Q€"), ("\n答", "42\n答")):
        stream = TextStream(decode, SamplingParams(stop=(stop,)))
        assert "".join(stream_pieces(stream, text.encode())) == text.removesuffix(stop)


def test_the_beginning_of_a_stop_string_is_held_back_before_a_space_that_may_go() -> None:
    texts = ["fi", "fi:", "fi: ", "fi:."]  # tokenizers remove the space before punctuation
    stream = TextStream(lambda tokens: texts[len(tokens)], SamplingParams(stop=(":.",)))
    assert [stream.piece([0] * length) for length in range(len(texts))] == ["fi", "", "", ""]


def test_a_tokenizer_that_changes_earlier_text_streams_its_final_text() -> None:
    """WordPiece, whose spaces transformers' ``clean_up_tokenization_spaces`` removes once the next token follows."""
    texts = [
        "I do n ' t know . We ' ve , he ' s ' un ' ##able ' !",
        "no ' n ' n n ' re",
        "[CLS] I know ?",
        "' [CLS] he",
        "he ' [CLS] un ' [CLS] re '",
    ]
    words = dict.fromkeys(["[UNK]", "[CLS]", "[SEP]", *" ".join(texts).split()])
    backend: Any = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))  # type: ignore[call-arg]
    backend.decoder = decoders.WordPiece()  # type: ignore[assignment]
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "eos_token": "[SEP]"}
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True, **names)
    detokenize = Detokenizer(tokenizer)
    for text, stop in product(texts, ((), ("zzz",), ("S]x",))):
        tokens = tokenizer.convert_tokens_to_ids(text.split())
        stream = TextStream(partial(detokenize, stop=stop, is_growing=True), SamplingParams(stop=stop))
        pieces = [stream.piece(tokens[:length]) for length in range(len(tokens) + 1)]
        final = tokenizer.decode(tokens, skip_special_tokens=True)
        assert detokenize(tokens, stop=stop) == final
        assert "".join(pieces) + stream.rest(final) == final


def test_a_request_that_starts_again_tells_nothing_twice() -> None:
    stream = TextStream(decode, SamplingParams())
    assert "".join(stream_pieces(stream, b"abc")) == "abc"
    assert stream_pieces(stream, b"abcd") == ["", "", "", "", "d"]
    assert stream.rest("abcd") == ""


def test_a_long_stop_string_costs_no_more_than_the_text() -> None:
    """A request of a megabyte must not hold the engine's thread, which decodes for everyone."""

    class Counted(str):
        num_slices = 0

        def __getitem__(self, key: Any) -> str:
            Counted.num_slices += 1
            return super().__getitem__(key)

    stream = TextStream(decode, SamplingParams(stop=(Counted("c" * 100_000),)))
    assert "".join([*stream_pieces(stream, b"abcc"), stream.rest("abcc")]) == "abcc"
    assert Counted.num_slices <= 1 + 2 + 3 + 4
