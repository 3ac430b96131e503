"""Encodes conversations: a prompt's tokens, and a response's tokens after its prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any

from transformers import PreTrainedTokenizerBase

from refusion_lit.data.encoding import encode_parts
from refusion_lit.data.rendering import (
    NameGuard,
    check_turns,
    get_parts,
    leave_out_parts,
    list_texts,
    normalize_turns,
    render_turns,
)
from refusion_lit.modeling.chat_template import check_chat_options, find_thought_tags
from refusion_lit.modeling.vocabulary import EOS_IDS, get_add_bos, prompt_prefix, starts_with_bos
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
    assistant turn's opening. Without a chat template, ``prompt_template`` is filled in. A special token's name in the
    template becomes the token; in the query, it stays plain text. The text is encoded as a whole.

    The prompt begins with the BOS token if the tokenizer's policy says so
    (:func:`~refusion_lit.modeling.vocabulary.set_add_bos`) and the template does not write it. With ``add_bos: auto``,
    nothing is added to a chat template's tokens, as in transformers' ``apply_chat_template``. Unknown characters
    become the tokenizer's ``unk_token``, if it has one, with a warning.

    Args:
        tokenizer: The tokenizer.
        query: The query.
        prompt_template: Text with ``{query}`` in it.
        messages: Chat turns, instead of the query.
        tools: Tool descriptions for the chat template.
        chat_options: Chat template options besides the options that are stored with the tokenizer.

    Raises:
        ValueError: If the prompt is empty, a character is unknown, or the chat template refuses a turn, drops a turn or
            does not read an option.
    """
    require(isinstance(query, str), "query", "a text", query, "give turns of a chat as messages")
    if chat_options:
        check_chat_options(tokenizer, chat_options)
    chat = _Conversation(tokenizer, query, prompt_template, messages, tools, chat_options)
    check_turns(tokenizer, chat.turns, tools, chat_options, chat.opened)
    ids = chat.encode(chat.opened)
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
        tools: Tool descriptions for the chat template.
        answer: The assistant's turn, instead of the response, if it has more than text, such as tool calls.

    Raises:
        ValueError: If a character is unknown, or the chat template drops a part of ``answer``.
    """
    chat = _Conversation(tokenizer, query, prompt_template, messages, tools, answers=(response, answer))
    return chat.encode_text(response, prompt_ids) if answer is None else chat.encode_answer(answer, prompt_ids)


class _Conversation:
    """The turns before a response, rendered, and the encoding of a response after them.

    For the arguments see :func:`encode_prompt`; ``answers`` are the response's texts.

    Attributes:
        turns: The turns.
        opened: The rendered prompt, which ends with the assistant's opening.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        query: str,
        prompt_template: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        chat_options: Mapping[str, Any] | None = None,
        answers: Sequence[object] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self.turns = normalize_turns(messages) or [{"role": "user", "content": query}]
        self._guard = NameGuard(tokenizer, [query, *list_texts([self.turns, tools, answers])])
        self._rendering = {"prompt_template": prompt_template, "tools": tools, "chat_options": chat_options}
        self.opened = self._render(self.turns, is_open=True)

    def _render(self, turns: Sequence[Mapping[str, Any]], *, is_open: bool = False) -> str:
        """Render turns, with the assistant's opening if ``is_open``; raise ValueError if the template refuses them."""
        return render_turns(self._tokenizer, self._guard, turns, is_open=is_open, **self._rendering)

    def encode(self, rendered: str) -> list[int]:
        """Encode rendered text from its beginning, with BOS if the tokenizer's policy says so."""
        tokenizer = self._tokenizer
        ids = encode_parts(tokenizer, self._guard.split(rendered), allow_unknown=True)
        is_complete = not ids or (bool(tokenizer.chat_template) and get_add_bos(tokenizer) == "auto")
        return ids if is_complete or starts_with_bos(ids, tokenizer) else [*prompt_prefix(tokenizer), *ids]

    def _encode_within(self, rendered: str) -> list[int]:
        """Encode a part of a rendered text alone."""
        return encode_parts(self._tokenizer, self._guard.split(rendered), within=True)

    def _encode_rest(self, rendered: str, prompt_ids: Sequence[int]) -> list[int]:
        """Encode the text after the prompt's text.

        Returns:
            The whole text's tokens after ``prompt_ids``. If the whole text begins otherwise, the rest is encoded alone.

        Raises:
            ValueError: If a character of the rest is unknown.
        """
        try:
            whole = self.encode(rendered)
        except ValueError:  # the border joins two words to an unknown word
            whole = []
        rest = whole[len(prompt_ids) :]
        if whole[: len(prompt_ids)] == [*prompt_ids] and self._tokenizer.unk_token_id not in rest:
            return rest
        return self._encode_within(rendered[len(self.opened) :])

    def encode_text(self, response: str, prompt_ids: Sequence[int]) -> list[int]:
        """Encode a response, including its end; see :func:`encode_response`."""
        guard, opened = self._guard, self.opened
        eos = int(self._tokenizer.eos_token_id)  # type: ignore[arg-type]
        if not self._tokenizer.chat_template:
            return [*self._encode_rest(opened + guard.mark(response), prompt_ids), eos]

        def render(content: str) -> str:
            try:
                return self._render([*self.turns, {"role": "assistant", "content": content}])
            except ValueError:  # a template may accept the prompt and refuse the whole conversation
                return ""

        probed = render(guard.probe)
        before, _, closing = probed.rpartition(guard.probe) if guard.probe in probed else ("", "", "")
        end = closing[: self._find_end(closing) or 0]
        after = [] if end else [eos]
        rendered = render(response)
        body = rendered.removesuffix(closing) if rendered.endswith(closing) else ""
        text = guard.mark(response, is_answer=True).strip()
        # Many templates trim an answer. Some write it in another form, such as JSON. Others leave out parts, such as
        # thoughts, which are trained nevertheless.
        is_kept = body.rstrip().endswith(text)
        has_thoughts = find_thought_tags(self._tokenizer.chat_template)[1] in text
        is_rewritten = guard.probe in probed and not has_thoughts and body[len(opened) :].strip() not in text
        if (is_kept or is_rewritten) and body.startswith(opened):
            return [*self._encode_rest(body + end, prompt_ids), *after]
        self._check_order()
        if is_kept and body and _without_opening(response, opened) == response:
            # The template writes the earlier turns or the assistant's opening in another way than in the prompt, such
            # as Mistral's system text, which is in the last turn of the user, and openings with "<think>".
            is_plain = body.startswith(before) and body[len(before) :].strip() == text
            start = len(before) if is_plain else len(body.rstrip()) - len(text)
            lead = _find_lead(body[:start], opened, guard.mark(str(self.turns[-1].get("content") or "")))
            return [*self._encode_within(lead + body[start:] + end), *after]
        text = guard.mark(_without_opening(response, opened), is_answer=True)
        return [*self._encode_within(text + end), *after]

    def encode_answer(self, answer: Mapping[str, Any], prompt_ids: Sequence[int]) -> list[int]:
        """Encode an assistant's turn with tool calls or reasoning as the chat template renders it, including its end.

        Args:
            answer: The assistant's turn.
            prompt_ids: The encoded prompt.

        Raises:
            ValueError: If the chat template does not render every part of the turn.
        """
        option = f"turn {len(self.turns) + 1} (assistant)"
        fix = "use a chat template that renders it, give the turn weight 0, or set data.task.assistant_parts: text"
        has_template = bool(self._tokenizer.chat_template)
        require(has_template, option, "text, as the tokenizer has no chat template", get_parts(answer), fix)

        def render(turn: Mapping[str, Any]) -> str:
            return self._render([*self.turns, turn])

        try:
            rendered = render(answer)
        except ValueError as error:
            raise ValueError(f"{option} with {', '.join(get_parts(answer))}: {error}") from error
        for part, turn in leave_out_parts(answer):
            try:
                is_dropped = render(turn) == rendered
            except ValueError:  # the template inspects the part, so it does not drop the part
                continue
            require(not is_dropped, option, f"a chat template that renders the turn's {part}", answer[part], fix)
        before, _, closing = render({"role": "assistant", "content": self._guard.probe}).partition(self._guard.probe)
        num_common = len(commonprefix([rendered[::-1], closing[::-1]]))  # noqa: RUF071 - no paths
        ends = self._guard.find_names(rendered)
        end = self._find_end(rendered, len(rendered) - num_common)
        if end is None and ends and not rendered[ends[-1][1] :].strip():
            end = ends[-1][1]  # calls may end with another token than text, such as <|eom_id|>
        text = rendered[: len(rendered) - num_common if end is None else end]
        if text.startswith(self.opened):
            ids = self._encode_rest(text, prompt_ids)
        else:  # The template writes earlier turns of the assistant without the opening.
            self._check_order()
            expected = "a chat template that renders it after the earlier turns"
            require(text.startswith(before), option, expected, answer, fix)
            ids = self._encode_within(text[len(before) :])
        return ids if end is not None else [*ids, int(self._tokenizer.eos_token_id)]  # type: ignore[arg-type]

    def _find_end(self, text: str, start: int = 0) -> int | None:
        """Return where the special token that ends a turn ends in a text; ``None`` without special tokens' names.

        Names may follow each other directly: Cohere's templates end the answer and then the turn. The EOS token among
        such names ends the turn, or the first name if none is the EOS token.

        Args:
            text: The text.
            start: Where the answer has ended in the text.
        """
        names = self._guard.find_names(text, start)
        if not names:
            return None
        run = [names[0]]
        for name in names[1:]:
            if name[0] == run[-1][1]:
                run.append(name)
        tokenizer = self._tokenizer
        ends = [tokenizer.eos_token_id, *tokenizer.init_kwargs.get(EOS_IDS, ())]
        chosen = (end for start, end in run if tokenizer.convert_tokens_to_ids(text[start:end]) in ends)
        return next(chosen, run[0][1])

    def _check_order(self) -> None:
        """Refuse a chat template without an opening that closes a list of turns after the last turn, such as JSON.

        An answer after the closed list would be no turn of the conversation.
        """
        probe = self._guard.probe
        probes = [*self.turns[:-1], {**self.turns[-1], "content": probe}]
        try:
            if self.opened != self._render(self.turns):
                return  # the template opens the assistant's turn
            answered = self._render([*probes, {"role": "assistant", "content": ""}])
            ends = [rendered.rpartition(probe)[2] for rendered in (self._render(probes), answered)]
        except ValueError:  # a template may refuse a turn without text
            return
        expected = "a chat template that writes an answer after the turns before it"
        fix = "use a template that opens the assistant's turn if add_generation_prompt is set"
        require(ends[1].startswith(ends[0]), "chat_template", expected, f"a prompt that ends with {ends[0]!r}", fix)


_TAG_AT_END = re.compile(r"(<[^<>\s]+>)(\s*)\Z")


def _find_lead(before: str, opened: str, query: str) -> str:
    """Return the text between the assistant's opening and the answer in a rendered chat, such as a space.

    Args:
        before: The rendered chat up to the answer.
        opened: The rendered prompt, which ends with the last turn and the assistant's opening.
        query: The last turn's text.
    """
    if not query or query not in before or query not in opened:
        return ""
    between, opening = (text.rpartition(query)[2] for text in (before, opened))
    return between[len(opening) :] if between.startswith(opening) else ""


def _without_opening(response: str, opened: str) -> str:
    """Return a response without its opening thought tag if the prompt already ends with this tag."""
    tag = _TAG_AT_END.search(opened)
    text = response.lstrip()
    if tag is None or not text.startswith(tag[1]):
        return response
    text = text[len(tag[1]) :]
    return text[len(commonprefix([text, tag[2]])) :]  # noqa: RUF071 - no paths


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token with which the chat template ends the assistant's turn; ``None`` if unknown."""
    if not tokenizer.chat_template:
        return None
    try:
        return encode_response(tokenizer, "a", encode_prompt(tokenizer, "a"), "a")[-1]
    except ValueError:
        return None
