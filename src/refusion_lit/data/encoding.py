"""Encoding of prompts and responses.

Text of users and data sets never becomes a special token.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from refusion_lit.data.tokenizers import unknown_text
from refusion_lit.modeling.chat_template import check_chat_options, get_chat_options
from refusion_lit.modeling.vocabulary import EOS_IDS, get_add_bos, prompt_prefix, starts_with_bos
from refusion_lit.tasks.base import MORE_THAN_TEXT
from refusion_lit.utils.require import require


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    query: str,
    prompt_template: str = "{query}",
    messages: Sequence[Mapping[str, Any]] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    chat_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encode a query as a prompt.

    With a chat template, the query is a user turn (or ``messages`` are the turns), followed by the
    assistant turn's opening. Without a chat template, ``prompt_template`` is filled in. A special token's name becomes
    the token if the template contains it, and plain text if the query does. The text is encoded as a whole.

    The prompt begins with the BOS token if the tokenizer's policy says so
    (:func:`~refusion_lit.modeling.vocabulary.set_add_bos`) and the template does not write it. With ``add_bos: auto``,
    nothing is added to a chat template's tokens, as in transformers' ``apply_chat_template``.

    Args:
        tokenizer: The tokenizer.
        query: The query.
        prompt_template: Text with ``{query}`` in it.
        messages: Chat turns, instead of the query.
        tools: Descriptions of tools for the chat template.
        chat_options: Options of the chat template besides the options that are kept with the tokenizer.

    Raises:
        ValueError: If a character is unknown, the chat template refuses or drops a turn or does not read an option,
            or the prompt is empty.
    """
    require(isinstance(query, str), "query", "a text", query, "give turns of a chat as messages")
    turns = _read_turns(messages) or [{"role": "user", "content": query}]
    guard = _Guard(tokenizer, [query, *_texts_in([turns, tools])])
    if chat_options:
        check_chat_options(tokenizer, chat_options)
    rendered = _render(tokenizer, guard, turns, prompt_template, tools, chat_options=chat_options)
    _check_turns(tokenizer, turns, tools, chat_options)
    ids = _encode_rendered(tokenizer, guard, rendered)
    if not ids:
        raise ValueError("prompt: expected some text, got an empty prompt; give it some text.")
    return ids


def encode_response(
    tokenizer: PreTrainedTokenizerBase,
    response: str,
    prompt_ids: Sequence[int],
    query: str,
    prompt_template: str = "{query}",
    messages: Sequence[Mapping[str, Any]] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    answer: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encode a response as a part of the whole text, including its end.

    Prompt and response together are the rendered conversation's tokens, up to the special token that ends the
    assistant's turn. Without a chat template, they are the whole text's tokens, followed by EOS. If the whole text
    is split within the prompt's last token, the response is encoded as text within a text.

    Args:
        tokenizer: The tokenizer.
        response: The response.
        prompt_ids: The prompt, from :func:`encode_prompt` with the following arguments.
        query: The query.
        prompt_template: Text with ``{query}`` in it.
        messages: Chat turns, instead of the query.
        tools: Descriptions of tools for the chat template.
        answer: The assistant's turn, instead of the response, if it has more than text, such as tool calls.

    Raises:
        ValueError: If a character is unknown, or the chat template drops a part of ``answer``.
    """
    turns = _read_turns(messages) or [{"role": "user", "content": query}]
    guard = _Guard(tokenizer, [query, response, *_texts_in([turns, tools, answer])])
    opened = _render(tokenizer, guard, turns, prompt_template, tools)
    if answer is not None:
        return _encode_answer(tokenizer, guard, turns, answer, tools, opened, prompt_ids)
    eos = int(tokenizer.eos_token_id)  # type: ignore[arg-type]
    if not tokenizer.chat_template:
        rest = guard.mark(response)
        try:
            whole = _encode_rendered(tokenizer, guard, opened + rest)
        except ValueError:  # the border joins two words to an unknown word
            whole = []
        is_split = whole[: len(prompt_ids)] != [*prompt_ids]
        ids = _encode_parts(tokenizer, guard.split(rest), within=True) if is_split else whole[len(prompt_ids) :]
        return [*ids, eos]

    def render(content: str) -> str:
        answered = [*turns, {"role": "assistant", "content": content}]
        try:
            return _render(tokenizer, guard, answered, prompt_template, tools, is_open=False)
        except ValueError:  # a template may refuse what the prompt's template does not
            return ""

    rendered = render(response)
    marked = guard.mark(response)
    ids = []
    if rendered.startswith(opened):
        ids = _encode_rest(tokenizer, guard, rendered, opened, prompt_ids)
    elif response and marked in rendered:
        # The template writes the earlier turns or the assistant's opening in another way than in the prompt, such as
        # Mistral's system text, which is in the last turn of the user, and openings with "<think>".
        before, _, closing = rendered.rpartition(marked)
        lead = _find_lead(before, opened, guard.mark(str(turns[-1].get("content") or "")))
        ids = _encode_parts(tokenizer, guard.split(lead + marked + closing), within=True)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    for place, token in enumerate(ids):
        if token in special and response.strip() in str(tokenizer.decode(ids[:place])):
            return ids[: place + 1]
    # The template changes the text, by leaving out thoughts, say: the text is encoded as it is, with the turn's end.
    text = _without_opening(response, opened)
    closing = render(guard.probe).rpartition(guard.probe)[2]
    names = [closing[start:end] for start, end in guard.find_names(closing)]
    end = tokenizer.convert_tokens_to_ids(names[0]) if names else eos
    return [*_encode_parts(tokenizer, guard.split(guard.mark(text)), within=True), int(end)]  # type: ignore[arg-type]


def _find_lead(before: str, opened: str, query: str) -> str:
    """Return the text between the assistant's opening and the answer in a rendered chat, such as a space.

    Args:
        before: The rendered chat up to the answer.
        opened: The rendered prompt, which has the last turn and the opening at its end.
        query: The text of the turn before the answer.
    """
    if not query or query not in before or query not in opened:
        return ""
    between, opening = (text.rpartition(query)[2] for text in (before, opened))
    return between[len(opening) :] if between.startswith(opening) else ""


def _without_opening(response: str, opened: str) -> str:
    """Return a response without the tag that begins its thoughts if the prompt ends with this tag already."""
    tag = _TAG_AT_END.search(opened)
    text = response.lstrip()
    if tag is None or not text.startswith(tag[1]):
        return response
    return text[len(tag[1]) :].removeprefix(tag[2])


_TAG_AT_END = re.compile(r"(<[^<>\s]+>)(\s*)\Z")


def _encode_rest(
    tokenizer: PreTrainedTokenizerBase, guard: _Guard, rendered: str, opened: str, prompt_ids: Sequence[int]
) -> list[int]:
    """Encode what follows the prompt's text ``opened`` in a text, as a part of the whole text if the prompt is, too."""
    whole = _encode_rendered(tokenizer, guard, rendered)
    if whole[: len(prompt_ids)] == [*prompt_ids]:
        return whole[len(prompt_ids) :]
    return _encode_parts(tokenizer, guard.split(rendered[len(opened) :]), within=True)


def _encode_answer(
    tokenizer: PreTrainedTokenizerBase,
    guard: _Guard,
    turns: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    opened: str,
    prompt_ids: Sequence[int],
) -> list[int]:
    """Encode an assistant's turn with tool calls or reasoning as the chat template renders it, including its end.

    Args:
        tokenizer: The tokenizer.
        guard: Marks names of special tokens.
        turns: The turns before the assistant's turn.
        answer: The assistant's turn.
        tools: Descriptions of tools.
        opened: The rendered prompt.
        prompt_ids: The encoded prompt.

    Raises:
        ValueError: If the chat template does not render every part of the turn.
    """
    option = f"turn {len(turns) + 1} (assistant)"
    fix = "use a chat template that renders it, give the turn weight 0, or set data.task.assistant_parts: text"
    has_template = bool(tokenizer.chat_template)
    require(has_template, option, "text, as the tokenizer has no chat template", _get_parts(answer), fix)

    def render(turn: Mapping[str, Any]) -> str:
        return _render(tokenizer, guard, [*turns, turn], "", tools, is_open=False)

    try:
        rendered = render(answer)
    except ValueError as error:
        raise ValueError(f"{option} with {', '.join(_get_parts(answer))}: {error}") from error
    for part, turn in _leave_out_parts(answer):
        try:
            is_dropped = render(turn) == rendered
        except ValueError:  # the template inspects the part, so it does not drop the part
            continue
        require(not is_dropped, option, f"a chat template that renders the turn's {part}", answer[part], fix)
    before, _, closing = render({"role": "assistant", "content": guard.probe}).partition(guard.probe)
    num_common = len(commonprefix([rendered[::-1], closing[::-1]]))  # noqa: RUF071 - no paths
    ends = guard.find_names(rendered)
    end = next((end for start, end in ends if start >= len(rendered) - num_common), None)
    if end is None and ends and not rendered[ends[-1][1] :].strip():
        end = ends[-1][1]  # calls may end with another token than text, such as <|eom_id|>
    text = rendered[: len(rendered) - num_common if end is None else end]
    if text.startswith(opened):
        ids = _encode_rest(tokenizer, guard, text, opened, prompt_ids)
    else:  # The template writes earlier turns of the assistant without the opening.
        require(text.startswith(before), option, "a chat template that renders it after the earlier turns", answer, fix)
        ids = _encode_parts(tokenizer, guard.split(text[len(before) :]), within=True)
    return ids if end is not None else [*ids, int(tokenizer.eos_token_id)]  # type: ignore[arg-type]


def _get_parts(turn: Mapping[str, Any]) -> list[str]:
    """Return the names of an assistant turn's parts besides its role that are not empty."""
    return [name for name in ("content", *MORE_THAN_TEXT) if turn.get(name)]


def _leave_out_parts(turn: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of every part of an assistant's turn, and the turn without the part; every call is a part."""
    for name in _get_parts(turn):
        others = {key: value for key, value in turn.items() if key != name}
        if name == "content":
            yield name, {**others, name: ""}
        elif name == "tool_calls" and len(turn[name]) > 1:
            for index in range(len(turn[name])):
                yield name, {**others, name: [*turn[name][:index], *turn[name][index + 1 :]]}
        else:
            yield name, {"content": "", **others}


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token with which the chat template ends the assistant's turn; ``None`` if unknown."""
    if not tokenizer.chat_template:
        return None
    try:
        return encode_response(tokenizer, "a", encode_prompt(tokenizer, "a"), "a")[-1]
    except ValueError:
        return None


def encode_within(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode text that does not begin a text: SentencePiece then puts no space before it.

    Raises:
        ValueError: If a character is not in the tokenizer's alphabet.
    """
    ids = encode_text(tokenizer, text)
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    if not _MARKS_BEGINNING.search(f"{backend.normalizer} {backend.pre_tokenizer}"):
        return ids
    for anchor in ("\n", "a", "0"):
        try:
            before = encode_text(tokenizer, anchor)
            whole = encode_text(tokenizer, anchor + text)
        except ValueError:
            continue
        if whole[: len(before)] == before:
            return whole[len(before) :]
    return ids


def _read_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return chat turns whose contents are texts; the text parts of a content are joined.

    Raises:
        ValueError: If a turn has no role, or a content has a part of another type, such as an image, which a template
            may render silently.
    """
    is_sequence = isinstance(messages, Iterable) and not isinstance(messages, str | Mapping)
    fix = "put a single turn in a list"
    require(is_sequence, "messages", "a list of turns, each a dict with role and content", messages, fix)
    turns: list[Mapping[str, Any]] = []
    for number, turn in enumerate(messages):
        is_turn = isinstance(turn, Mapping) and isinstance(turn.get("role"), str)
        require(is_turn, f"messages.{number}", "a dict with role and content", turn, "write {role: user, content: ...}")
        content = turn.get("content")
        if not isinstance(content, list | tuple):
            turns.append(turn)
            continue
        texts: list[str] = []
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else part
            is_text = isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str)
            option = f"messages.{number}.content.{index}.type"
            require(is_text, option, "'text', because models read text only", kind, "leave the part out")
            texts.append(part["text"])
        turns.append({**turn, "content": "".join(texts)})
    return turns


_MARKS_BEGINNING = re.compile("prepend_scheme|Prepend|add_prefix_space=True")
"""In the description of a tokenizer that encodes a text's beginning differently."""


def _render(
    tokenizer: PreTrainedTokenizerBase,
    guard: _Guard,
    turns: Sequence[Mapping[str, Any]],
    prompt_template: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    is_open: bool = True,
    chat_options: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of turns, in which marks surround users' names of special tokens.

    Args:
        tokenizer: The tokenizer.
        guard: Marks the names.
        turns: The turns.
        prompt_template: Text with ``{query}`` in it, for tokenizers without a chat template.
        tools: Descriptions of tools for the chat template.
        is_open: Whether the text ends with the opening of the assistant's turn.
        chat_options: Options of the chat template besides the options that are kept with the tokenizer.

    Raises:
        ValueError: If the chat template refuses the turns, or there are several turns without a chat template.
    """
    roles = ", ".join(str(turn["role"]) for turn in turns)
    if not tokenizer.chat_template:
        expected = "one turn, as the tokenizer has no chat template"
        fix = "leave out the other turns, or use a tokenizer with a chat template"
        require(len(turns) == 1, "messages", expected, f"turns of {roles}", fix)
        return prompt_template.replace("{query}", guard.mark(str(turns[0].get("content") or "")))
    marked: Any = _map_texts(guard.mark, list(turns))
    options: dict[str, Any] = {**get_chat_options(tokenizer), **(chat_options or {})}
    if tools:
        options["tools"] = _map_texts(guard.mark, list(tools))
    try:
        return str(tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=is_open, **options))
    except Exception as error:  # a template may raise any error
        changeable = [name for name in chat_options or () if name != "continue_final_message"]
        fix = " or ".join(["reorder them", *(f"change {name}" for name in changeable)])
        message = f"messages: the chat template refuses turns of {roles} ({error}); {fix}."
        raise ValueError(message) from error


def _check_turns(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    chat_options: Mapping[str, Any] | None,
) -> None:
    """Refuse turns and tool calls that the chat template drops: many templates know no developer, some no calls.

    Raises:
        ValueError: If a turn with another role than system, user and assistant, or a call would not be in the prompt.
    """
    if not tokenizer.chat_template:
        return
    options: dict[str, Any] = {**get_chat_options(tokenizer), **(chat_options or {}), "tools": list(tools) or None}
    options |= {"tokenize": False, "add_generation_prompt": True}

    def render(turns: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the rendered turns; ``None`` if the template refuses them, as it does not drop what it inspects."""
        try:
            return str(tokenizer.apply_chat_template(list(turns), **options))  # type: ignore[arg-type]
        except Exception:  # a template may raise any error
            return None

    for number, turn in enumerate(turns):
        if turn["role"] not in ("system", "user", "assistant"):
            rendered = render([*turns[:number], {**turn, "content": _PROBE}, *turns[number + 1 :]])
            fix = "use system" if turn["role"] == "developer" else "leave it out"
            expected = "a role that the chat template renders"
            is_rendered = rendered is None or _PROBE in rendered
            require(is_rendered, f"messages.{number}.role", expected, turn["role"], fix)
    if not any(turn.get(name) for turn in turns for name in _CALLS):
        return
    # One rendering shows whether the names of all calls are in the prompt. If not, each call is left out in turn.
    probes: list[str] = []
    rendered = render([_rename_calls(turn, probes) for turn in turns])
    if rendered is not None and all(probe in rendered for probe in probes):
        return
    rendered = render(turns)
    if rendered is None:
        return
    for number, turn in enumerate(turns):
        for name, other in _leave_out_parts(turn):
            is_dropped = name in _CALLS and render([*turns[:number], other, *turns[number + 1 :]]) == rendered
            expected = f"a chat template that renders the calls of turn {number + 1} ({turn['role']})"
            fix = "use a template that renders them, or leave the turn out"
            require(not is_dropped, f"messages.{number}.{name}", expected, turn.get(name), fix)


_CALLS = ("tool_calls", "function_call")


def _rename_calls(turn: Mapping[str, Any], probes: list[str]) -> Mapping[str, Any]:
    """Return a turn whose calls name a probe instead of their functions, and append the probes to a list."""

    def rename(call: Any) -> Any:  # noqa: ANN401 - any JSON value
        probes.append(f"{_PROBE} {len(probes)}.")
        if not isinstance(call, Mapping):
            return call
        function = call.get("function")
        if isinstance(function, Mapping):
            return {**call, "function": {**function, "name": probes[-1]}}
        return {**call, "name": probes[-1]}

    turn = {**turn}
    if isinstance(turn.get("tool_calls"), list | tuple):
        turn["tool_calls"] = [*map(rename, turn["tool_calls"])]
    if turn.get("function_call"):
        turn["function_call"] = rename(turn["function_call"])
    return turn


_PROBE = "probe of a turn"


def _encode_rendered(tokenizer: PreTrainedTokenizerBase, guard: _Guard, rendered: str) -> list[int]:
    """Encode rendered text from its beginning, with BOS if the tokenizer's policy says so."""
    ids = _encode_parts(tokenizer, guard.split(rendered))
    is_complete = not ids or (bool(tokenizer.chat_template) and get_add_bos(tokenizer) == "auto")
    return ids if is_complete or starts_with_bos(ids, tokenizer) else [*prompt_prefix(tokenizer), *ids]


def _encode_parts(
    tokenizer: PreTrainedTokenizerBase, parts: Sequence[tuple[str, bool]], *, within: bool = False
) -> list[int]:
    """Encode texts that follow each other, of which some name special tokens and others are plain.

    Args:
        tokenizer: The tokenizer.
        parts: Pairs of a text and whether names in it mean special tokens.
        within: Whether the first text does not begin the whole text.
    """
    pattern = _added_names(tokenizer)
    if not within and not any(pattern.search(text) for text, is_template in parts if not is_template):
        return encode_text(tokenizer, "".join(text for text, _ in parts), special=True)
    pieces: list[tuple[str, bool]] = []  # text, and whether it is a special token
    for text, is_template in parts:
        split = pattern.split(text) if is_template else [text]
        for index, piece in enumerate(split):
            is_name = is_template and index % 2 == 1
            if pieces and not is_name and not pieces[-1][1]:
                pieces[-1] = (pieces[-1][0] + piece, False)
            elif piece:
                pieces.append((piece, is_name))
    ids: list[int] = []
    name = None
    for piece, is_name in _strip_beside_names(tokenizer, pieces):
        if is_name:
            ids.append(int(tokenizer.convert_tokens_to_ids(piece)))  # type: ignore[arg-type]
            name = piece
        else:
            begins = not (ids or within) or (name is not None and _begins_after(tokenizer, name))
            ids += encode_text(tokenizer, piece) if begins else encode_within(tokenizer, piece)
    return ids


def _strip_beside_names(
    tokenizer: PreTrainedTokenizerBase, pieces: Sequence[tuple[str, bool]]
) -> Iterator[tuple[str, bool]]:
    """Yield texts and names of added tokens without the white space that the tokens include, as Phi-3's tokens do."""
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    for index, (piece, is_name) in enumerate(pieces):
        before, after = pieces[max(index - 1, 0) : index], pieces[index + 1 : index + 2]
        if not is_name and before and added[before[0][0]].rstrip:
            piece = piece.lstrip()
        if not is_name and after and added[after[0][0]].lstrip:
            piece = piece.rstrip()
        if piece:
            yield piece, is_name


def _begins_after(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Return whether text after a special token is encoded as a text's beginning, as old SentencePiece files do."""
    for letter in ("a", "0"):
        try:
            return encode_text(tokenizer, name + letter, special=True)[1:] == encode_text(tokenizer, letter)
        except ValueError:  # the tokenizer does not know the letter
            continue
    return False


def _texts_in(value: object) -> Iterator[str]:
    """Yield the texts in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts_in([*value, *value.values()])
    elif isinstance(value, Iterable):
        for item in value:
            yield from _texts_in(item)


def _map_texts(function: Callable[[str], str], value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return nested lists and mappings with a function applied to their texts."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _map_texts(function, item) for name, item in value.items()}
    return [_map_texts(function, item) for item in value] if isinstance(value, list | tuple) else value


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], *, is_open: bool = True
) -> list[tuple[str, bool]]:
    """Render chat turns with the chat template, in parts.

    Args:
        tokenizer: A tokenizer with a chat template.
        messages: The turns.
        is_open: Whether the assistant's turn is opened; otherwise, the last turn is left open.

    Returns:
        Pairs of a text and whether names of special tokens in the text mean the tokens; see :func:`encode_rendered`.

    Raises:
        ValueError: If the chat template refuses the turns.
    """
    guard = _Guard(tokenizer, _texts_in(messages))
    options = {"continue_final_message": not is_open}
    return guard.split(_render(tokenizer, guard, messages, "", (), is_open=is_open, chat_options=options))


def encode_rendered(tokenizer: PreTrainedTokenizerBase, parts: Sequence[tuple[str, bool]]) -> list[int]:
    """Encode the parts of a text from :func:`render_chat`, without BOS before them.

    Raises:
        ValueError: If a character is not in the tokenizer's alphabet.
    """
    return _encode_parts(tokenizer, parts)


def encode_plain_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode a prompt without template, as :func:`encode_text` does, after BOS by the tokenizer's policy.

    Raises:
        ValueError: If a character is not in the tokenizer's alphabet.
    """
    return [*prompt_prefix(tokenizer), *encode_text(tokenizer, text)]


def split_added_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[tuple[str, bool]]:
    """Return the parts of a text, and whether a part is the name of an added token, special or not."""
    return [(part, index % 2 == 1) for index, part in enumerate(_added_names(tokenizer).split(text)) if part]


def _added_names(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern, in a group, for the names of a tokenizer's added tokens, special or not; long names first."""
    names = sorted((str(name) for name in tokenizer.added_tokens_encoder), key=len, reverse=True)  # type: ignore[attr-defined]
    return re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)")


class _Guard:
    """Marks names of special tokens in users' text, so that they differ from a template's names after rendering.

    Only names are marked, so that a template can trim and inspect the rest of the text.

    Args:
        tokenizer: The tokenizer with the special tokens.
        texts: All texts to mark; the marks are characters that occur in none of the texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> None:
        added = tokenizer.added_tokens_decoder.values()
        names = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")
        used = set().union(*texts)
        # Unicode reserves code points from U+FDD0 on for internal use; texts rarely contain them.
        free = (mark for mark in map(chr, range(0xFDD0, sys.maxunicode)) if mark not in used)
        self._open = next(free)
        self._close = next(free)
        self.probe = next(free)
        """A character that occurs in none of the texts."""

    def mark(self, text: str) -> str:
        """Mark the names of special tokens in a text."""
        return self._names.sub(lambda name: f"{self._open}{name[0]}{self._close}", text)

    def find_names(self, rendered: str) -> list[tuple[int, int]]:
        """Return where the names of special tokens that mean the tokens start and end."""
        return [name.span() for name in self._names.finditer(rendered) if rendered[name.start() - 1] != self._open]

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Split at the marks; return pairs of a text and whether names in the text mean special tokens."""
        parts = re.split(f"{self._open}([^{self._open}{self._close}]*){self._close}", rendered)
        # A template that truncates a name leaves an unpaired mark.
        unpaired = str.maketrans("", "", self._open + self._close)
        return [(part.translate(unpaired), i % 2 == 0) for i, part in enumerate(parts) if part]


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    """Encode text; with ``special``, names of special tokens become these tokens instead of plain text.

    Raises:
        ValueError: If a character is not in the tokenizer's alphabet.
    """
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined] - all our tokenizers are fast ones
    before = backend.encode_special_tokens
    backend.encode_special_tokens = not special
    try:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    except TypeError as error:
        message = f"text: expected Unicode, got a lone surrogate (in {text[:60]!r}); remove the \\udXXX from it."
        raise ValueError(message) from error
    finally:
        backend.encode_special_tokens = before
    untyped: Any = tokenizer  # transformers types ids as integers or lists
    # Tokens that stand for unknown text. A template may name them; then they are meant.
    fillers = {untyped.pad_token_id: untyped.pad_token, untyped.unk_token_id: untyped.unk_token}
    wrong = {token for token, name in fillers.items() if ids.count(token) > (text.count(str(name)) if special else 0)}
    if not special:
        wrong |= {untyped.mask_token_id, untyped.eos_token_id, *untyped.init_kwargs.get(EOS_IDS, ())}.intersection(ids)
    if wrong:
        raise unknown_text(backend, text, wrong.pop())
    return ids
