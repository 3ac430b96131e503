"""Draws the pictures of the documentation: python docs/pictures.py."""

from __future__ import annotations

import argparse

from drawing import CELL, TARGET, draw_steps, picture, row, text


def glossary() -> None:
    """Draw a response cut into slots and serial blocks, with places and positions."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    slots = [
        ("known", ["a@3", "b@4", "c@5"]),
        ("draft", ["d@6", "e@7", "f@8"]),
        ("mask", ["M@9", "M@10", "M@11"]),
        ("mask", ["M@12", "M@13", "M@14"]),
    ]
    parts = [row(70, "text, with positions", [prompt, *slots])]
    start = 250.0 + 3 * CELL + 8
    width = 3 * CELL + 8

    def brace(x: float, length: float, y: float, words: str) -> str:
        line = f'<path d="M{x} {y + 6} V{y} H{x + length} V{y + 6}" fill="none" stroke="#555"/>'
        return line + text(x + length / 2, y - 5, words, 12, "middle")

    starts = [start + i * width for i in range(4)]
    parts += [
        brace(250.0, 3 * CELL, 60, "prompt"),
        *[brace(x, 3 * CELL, 60, f"slot {i + 1}") for i, x in enumerate(starts)],
        brace(starts[0], 2 * width - 8, 30, "serial block 1"),
        brace(starts[2], 2 * width - 8, 30, "serial block 2"),
        text(8, 130, "Place of a token in the response: its position minus the prompt's length. Token a: position 3, "
                     "place 0.", 12),
        text(8, 148, "Grey: prompt. Green: committed, in the KV cache. Yellow: drafts that a plan proposed, which a "
                     "verification scores.", 12),
        text(8, 166, "Dashed: masks. Serial block 2 begins when all slots of serial block 1 are full.", 12),
    ]  # fmt: skip
    picture("glossary.svg", int(starts[3] + width + 8), 180, "Slots, serial blocks, places and positions", parts)


def decoding() -> None:
    """Draw one round of ReFusion with three slots of three tokens."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    masks = [f"M@{i}" for i in range(3, 12)]
    steps = [
        ("1  plan: draft all slots", [prompt, *[("mask", masks[i : i + 3]) for i in (0, 3, 6)]]),
        (
            "2  verify slots 1 and 3",
            [prompt, ("draft", ["a@3", "b@4", "c@5"]), ("draft", ["g@9", "h@10"]), ("rejected", ["x@11"])],
        ),
        ("3  accept slot 1, reject slot 3", [prompt, ("known", ["a@3", "b@4", "c@5"])]),
        (
            "4  plan the two slots that remain",
            [prompt, ("known", ["a@3", "b@4", "c@5"]), ("mask", masks[3:6]), ("mask", masks[6:])],
        ),
    ]
    note = (
        "Small numbers: position in the text. From left to right: sequence order, which causal attention follows. "
        "Grey: prompt. Dashed: mask. Yellow: draft. Red: rejected. Green: accepted by verification. KV cache "
        "entries of grey and green tokens stay and are exact."
    )
    draw_steps("decoding.svg", "One round of ReFusion", steps, note)


def window() -> None:
    """Draw two forwards of WeDLM with a window of four masks."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    steps = [
        ("1  feed the window's masks", [prompt, ("mask", [f"M@{i}" for i in range(3, 7)])]),
        (
            "2  fill those below the threshold",
            [prompt, ("draft", ["a@3"]), ("mask", ["M@4"]), ("draft", ["c@5"]), ("mask", ["M@6"])],
        ),
        ("3  refill; filled tokens first", [prompt, ("draft", ["a@3", "c@5"]), ("mask", ["M@4", "M@6", "M@7"])]),
        (
            "4  cache the leading run, fill again",
            [prompt, ("known", ["a@3"]), ("draft", ["b@4", "c@5"]), ("mask", ["M@6"]), ("draft", ["e@7"])],
        ),
    ]
    note = (
        "Small numbers: position in the text. Rows 1 and 3 are forwards: from left to right the sequence order, "
        "which causal attention follows. Rows 2 and 4 show the text after them. Grey: prompt. Dashed: mask. Yellow:"
        " filled, never changed. Green: filled and cached."
    )
    draw_steps("wedlm.svg", "Two forwards of WeDLM", steps, note)


def blocks() -> None:
    """Draw two forwards of CARD with blocks of four masks."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    steps = [
        ("1  feed the block but its last mask", [prompt, ("mask", [f"M@{i}" for i in range(3, 6)])]),
        (
            "2  fill those above the threshold",
            [prompt, ("draft", ["a@3"]), ("mask", ["M@4"]), ("draft", ["c@5", "d@6"])],
        ),
        ("3  feed up to the last mask", [("known", ["?@2"]), ("draft", ["a@3"])]),
        ("4  the block is full", [prompt, ("draft", ["a@3", "b@4", "c@5", "d@6"])]),
        (
            "5  feed it once more, and masks",
            [("known", ["a@3", "b@4", "c@5", "d@6"]), ("mask", [f"M@{i}" for i in range(7, 10)])],
        ),
    ]
    note = (
        "Small numbers: position in the text. Rows 1, 3 and 5 are forwards. The token before a mask predicts it. "
        "Grey: prompt. Dashed: mask. Yellow: filled, never changed. Green: computed for the cache."
    )
    draw_steps("card.svg", "Two forwards of CARD", steps, note)


def strides() -> None:
    """Draw three forwards of introspective strided decoding with a stride of four."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    masks = [f"M@{i}" for i in range(3, 14)]
    steps = [
        ("1  feed a token and masks", [prompt, ("known", ["a@3"]), ("mask", masks[1:4])]),
        ("2  add a token, keep drafts", [prompt, ("known", ["a@3", "b@4"]), ("draft", ["c@5", "d@6", "e@7"])]),
        ("3  feed drafts and masks", [("known", ["b@4"]), ("draft", ["c@5", "d@6", "e@7"]), ("mask", masks[5:8])]),
        (
            "4  all hold: add four, new drafts",
            [prompt, ("known", ["a@3", "b@4", "c@5", "d@6", "e@7", "f@8"]), ("draft", ["g@9", "h@10", "x@11"])],
        ),
        (
            "5  feed drafts and masks",
            [("known", ["f@8"]), ("draft", ["g@9", "h@10"]), ("rejected", ["x@11"]), ("mask", masks[9:11])],
        ),
    ]
    note = (
        "Small numbers: position in the text. Rows 1, 3 and 5 are forwards. A position predicts the token after it,"
        " so a draft is verified by the position before it. Row 5 adds g, h and the right token in place of x; its "
        "masks are lost. Grey: prompt. Dashed: mask. Yellow: draft. Red: rejected. Green: final."
    )
    draw_steps("introspective_strided.svg", "Three forwards of IntrospectiveStrided", steps, note, width=800)


def causal_blocks() -> None:
    """Draw forwards of CausalBlockDiffusion with blocks of four."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    steps = [
        ("1  feed the prompt, causal", [prompt]),
        ("2  its token begins the block", [prompt, ("known", ["a@3"]), ("mask", ["M@4", "M@5", "M@6"])]),
        ("3  feed the block, both directions", [("known", ["a@3"]), ("mask", ["M@4", "M@5", "M@6"])]),
        ("4  fill; feed until it is full", [("known", ["a@3"]), ("mask", ["M@4"]), ("draft", ["c@5", "d@6"])]),
        ("5  feed the full block, causal", [("known", ["a@3", "b@4", "c@5", "d@6"])]),
        ("6  its token begins the next", [("known", ["e@7"]), ("mask", ["M@8", "M@9", "M@10"])]),
    ]
    note = (
        "Small numbers: position in the text. Rows 1, 3, 4 and 5 are forwards over the cached text. In rows 3 and 4"
        " all tokens of the block see each other. Grey: prompt. Dashed: mask. Yellow: filled. Green: known."
    )
    draw_steps("causal_block_diffusion.svg", "Four forwards of CausalBlockDiffusion", steps, note)


def linear_speculation() -> None:
    """Draw a round of LinearSpeculation with blocks of five."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    steps = [
        ("1  feed masks, both directions", [("known", ["a@3"]), ("mask", ["M@4", "M@5", "M@6", "M@7"])]),
        ("2  feed the drafts, causal", [("known", ["a@3"]), ("draft", ["b@4", "c@5"]), ("rejected", ["x@6", "y@7"])]),
        ("3  keep what is right, add one", [prompt, ("known", ["a@3", "b@4", "c@5", "d@6"])]),
    ]
    note = (
        "Small numbers: position in the text. Rows 1 and 2 are forwards over the cached text. In row 2 a position "
        "predicts the token after it: c is right, x is not, and d is the token in its place. Grey: prompt. Dashed: "
        "mask. Yellow: draft. Red: rejected. Green: final."
    )
    draw_steps("linear_speculation.svg", "A round of LinearSpeculation", steps, note)


def canvas() -> None:
    """Draw two steps of UniformDiffusion on a canvas of four tokens."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    steps = [
        ("1  encoder: feed the text, causal", [prompt]),
        ("2  decoder: feed random tokens", [prompt, ("mask", ["q@3", "k@4", "z@5", "w@6"])]),
        ("3  sample all, keep the surest", [prompt, ("draft", ["a@3"]), ("rejected", ["x@4"]), ("draft", ["c@5"]),
                                            ("rejected", ["y@6"])]),
        ("4  new noise for the rest; feed", [prompt, ("draft", ["a@3"]), ("mask", ["p@4"]), ("draft", ["c@5"]),
                                             ("mask", ["t@6"])]),
        ("5  sample and keep again", [prompt, ("draft", ["a@3", "b@4"]), ("rejected", ["v@5"]), ("draft", ["d@6"])]),
        ("6  stable and sure: the draft is text", [prompt, ("known", ["a@3", "b@4", "c@5", "d@6"])]),
    ]  # fmt: skip
    note = (
        "Small numbers: position in the text. Rows 1, 2 and 4 are forwards; in rows 2 and 4 all tokens of the canvas "
        "see the text and one another. Grey: prompt. Dashed: random token. Yellow: sampled and kept; c was kept in "
        "row 3, but not in row 5. Red: replaced by noise. Green: final, the most probable token of each place."
    )
    draw_steps("uniform_diffusion.svg", "One canvas of UniformDiffusion", steps, note)


def block_drafter() -> None:
    """Draw a round of SelfSpeculative with a block drafter of five tokens."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    steps = [
        ("1  model: feed the drafts, causal", [prompt, ("known", ["a@3"]), ("draft", ["b@4", "c@5"]),
                                               ("rejected", ["x@6", "y@7"])]),
        ("2  keep what is right, add one", [prompt, ("known", ["a@3", "b@4", "c@5", "d@6"])]),
        ("3  drafter: feed a token and masks", [("known", ["d@6"]), ("mask", ["M@7", "M@8", "M@9", "M@10"])]),
        ("4  masks become the next drafts", [("known", ["d@6"]), ("draft", ["e@7", "f@8", "g@9", "h@10"])]),
    ]  # fmt: skip
    note = (
        "Small numbers: position in the text. Rows 1 and 3 are forwards. In row 1 a position predicts the token after "
        "it: c is right, x is not, and d is the token in its place. In row 3 the tokens of the block see one another "
        "and hidden states of the model at all text before d. Grey: prompt. Dashed: mask. Yellow: draft. Red: "
        "rejected. Green: the model's own text."
    )
    draw_steps("block_drafter.svg", "One round with a block drafter", steps, note)


def pipeline() -> None:
    """Draw three forwards of D2F with blocks of three masks."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    masks = [f"M@{i}" for i in range(3, 12)]
    steps = [
        ("1  feed the first block", [prompt, ("mask", masks[:3])]),
        ("2  fill: one mask is sure enough", [prompt, ("mask", masks[:1]), ("draft", ["b@4"]), ("mask", masks[2:3])]),
        (
            "3  open the next block, feed both",
            [("mask", masks[:1]), ("draft", ["b@4"]), ("mask", masks[2:3]), ("mask", masks[3:6])],
        ),
        ("4  fill in both", [prompt, ("draft", ["a@3", "b@4", "c@5"]), ("draft", ["d@6"]), ("mask", masks[4:6])]),
        (
            "5  open a third, feed all",
            [("known", ["a@3", "b@4", "c@5"]), ("draft", ["d@6"]), ("mask", masks[4:6]), ("mask", masks[6:])],
        ),
    ]
    note = (
        "Small numbers: position in the text. Rows 1, 3 and 5 are forwards over the cached text. A block sees "
        "itself and all blocks before it. Dashed: mask. Yellow: filled, never changed. Green: complete, stored by "
        "this forward."
    )
    draw_steps("d2f.svg", "Three forwards of D2F", steps, note)


def editing() -> None:
    """Draw a block of four masks that is filled and edited."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    steps = [
        ("1  feed a block of masks", [prompt, ("mask", [f"M@{i}" for i in range(3, 7)])]),
        (
            "2  fill those above the threshold",
            [prompt, ("draft", ["a@3", "x@4"]), ("mask", ["M@5"]), ("draft", ["d@6"])],
        ),
        (
            "3  next forward: fill and replace",
            [prompt, ("draft", ["a@3"]), ("rejected", ["b@4"]), ("draft", ["c@5", "d@6"])],
        ),
        ("4  a forward replaces nothing", [prompt, ("draft", ["a@3", "b@4", "c@5", "d@6"])]),
        (
            "5  feed it with the next block",
            [("known", ["a@3", "b@4", "c@5", "d@6"]), ("mask", [f"M@{i}" for i in range(7, 11)])],
        ),
    ]
    note = (
        "Small numbers: position in the text. Each row is a forward or the text after it. Grey: prompt. Dashed: "
        "mask. Yellow: filled, may change. Red: replaced, x by b. Green: final, stored in the cache by this "
        "forward."
    )
    draw_steps("token_editing.svg", "One block of token editing", steps, note)


def sets() -> None:
    """Draw two forwards of set diffusion with a window of four masks."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    steps = [
        ("1  feed the window's masks", [prompt, *[("mask", [f"M@{i}"]) for i in range(3, 7)]]),
        (
            "2  fill those above the threshold",
            [prompt, ("draft", ["a@3"]), ("mask", ["M@4"]), ("draft", ["c@5"]), ("mask", ["M@6"])],
        ),
        (
            "3  store them, feed the masks",
            [prompt, ("known", ["a@3", "c@5"]), *[("mask", [f"M@{i}"]) for i in (4, 6, 7)]],
        ),
        ("4  fill again", [prompt, ("draft", ["a@3", "b@4", "c@5"]), ("mask", ["M@6"]), ("draft", ["e@7"])]),
        (
            "5  store these, move the window",
            [prompt, ("known", ["a@3", "c@5", "b@4", "e@7"]), *[("mask", [f"M@{i}"]) for i in (6, 8, 9)]],
        ),
    ]
    note = (
        "Small numbers: position in the text. Rows 1, 3 and 5 are forwards, in sequence order. A mask sees all "
        "tokens before the masks, and no other mask. Yellow: filled, never changed. Green: in the cache, exact, in "
        "this order."
    )
    draw_steps("set_diffusion.svg", "Two forwards of set diffusion", steps, note)


def verification() -> None:
    """Draw one round of APD with a window of five masks."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    drafts = ["a@3", "b@4", "c@5", "x@6", "e@7"]
    steps = [
        ("1  masked model: feed masks", [prompt, ("mask", [f"M@{i}" for i in range(3, 8)])]),
        ("2  it drafts them all", [prompt, ("draft", drafts)]),
        ("3  verifier: reads all but the last", [prompt, ("draft", drafts[:-1])]),
        ("4  draft and target agree up to c", [prompt, ("known", drafts[:3]), ("rejected", drafts[3:])]),
        (
            "5  masked model: the next window",
            [prompt, ("known", drafts[:3]), ("mask", [f"M@{i}" for i in range(6, 11)])],
        ),
    ]
    note = (
        "Small numbers: position in the text. The masked model sees all of its row, the verifier what stands to the"
        " left. Grey: prompt. Dashed: mask. Yellow: draft. Green: committed, in the verifier's cache. Red: dropped."
    )
    draw_steps("apd.svg", "One round of APD", steps, note)


def training() -> None:
    """Draw the layout of a training sequence."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    first, second = ("known", ["a@3", "b@4", "c@5"]), ("known", ["d@6", "e@7", "f@8"])
    third, masked = ("known", ["g@9", "h@10", "$@11"]), ("mask", ["M@6", "M@7", "M@8"])
    steps = [
        ("sample in slots of three tokens", [prompt, first, second, third]),
        ("input: clean slots first, shuffled", [prompt, third, first, masked]),
        (
            "targets",
            [
                ("prompt", ["", "", ""]),
                ("draft", ["h", "$", ""]),
                ("draft", ["b", "c", ""]),
                ("draft", ["d", "e", "f"]),
            ],
        ),
    ]
    note = "Clean slots learn the next token inside the slot, masked slots learn their own tokens."
    draw_steps("training.svg", "The hybrid objective's sequence", steps, note)


def attention() -> None:
    """Draw the attention patterns of the decoder families."""
    size, num = 14, 8
    patterns = (
        ("causal (ReFusion, autoregressive)", lambda query, key: key <= query),
        ("bidirectional (LLaDA, Fast-dLLM)", lambda query, key: key < num + query),
        ("block-causal, blocks of 2", lambda query, key: key // 2 <= query // 2),
    )
    parts = []
    for index, (name, sees) in enumerate(patterns):
        left = 20 + index * 225
        parts.append(text(left, 20, name, 12))
        for query in range(num):
            for key in range(num):
                colour = "#3b8f7f" if sees(query, key) else "#eeeeee"
                x, y = left + key * size, 32 + query * size
                parts.append(f'<rect x="{x}" y="{y}" width="{size - 1}" height="{size - 1}" fill="{colour}"/>')
    parts.append(text(20, 164, "Rows: queries. Columns: keys. A token attends to the dark positions of its row.", 12))
    picture("attention.svg", 700, 176, "Attention patterns", parts)


def groups() -> None:
    """Draw three forwards of FirstHitting with groups of three and two tokens."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    steps = [
        ("1  masks of the first group", [prompt, ("mask", ["M@3", "M@4", "M@5"])]),
        ("2  that group clean, the next masks", [prompt, ("known", ["a@3", "b@4", "c@5"]), ("mask", ["M@6", "M@7"])]),
        (
            "3  the rest, one token per forward",
            [prompt, ("known", ["a@3", "b@4", "c@5", "d@6", "e@7"]), ("mask", ["M@8"])],
        ),
    ]
    note = (
        "Small numbers: position in the text. From left to right: sequence order, which causal attention follows. "
        "Grey: prompt. Dashed: mask. Green: decoded, fed clean once and cached."
    )
    draw_steps("first_hitting.svg", "Three forwards of FirstHitting", steps, note)


def search() -> None:
    """Draw one step of SlotSearch with three slots of two tokens."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    masks = [("mask", [f"M@{i}", f"M@{i + 1}"]) for i in (3, 5, 7)]
    steps = [
        ("1  plan: first token of each slot", [prompt, *masks]),
        ("2  try slot 1, look ahead to 3", [prompt, ("draft", ["a@3", "b@4"]), ("draft", ["x@7", "y@8"])]),
        ("3  try slot 3, look ahead to 1", [prompt, ("draft", ["e@7", "f@8"]), ("draft", ["a@3", "d@4"])]),
        ("4  commit the better one, plan again", [prompt, ("known", ["e@7", "f@8"]), *masks[:2]]),
    ]
    note = (
        "Small numbers: position in the text. From left to right: sequence order, which causal attention follows. "
        "Grey: prompt. Dashed: mask. Yellow: tried, then dropped. Green: committed, cached. What is tried lies in "
        "the cache side by side; each order sees its own slots only."
    )
    draw_steps("slot_search.svg", "One step of SlotSearch", steps, note)


def convolution() -> None:
    """Draw two steps of convolutional decoding with a kernel of five positions."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    masks = [f"M@{i}" for i in range(3, 9)]
    steps = [
        ("1  feed the canvas", [prompt, ("mask", masks)]),
        (
            "2  weights of the drafts",
            [prompt, ("draft", [".96@3", ".76@4"]), ("mask", [f"0@{i}" for i in range(5, 9)])],
        ),
        ("3  unmask the best, feed again", [prompt, ("known", ["a@3"]), ("mask", masks[1:])]),
        (
            "4  weights of the drafts",
            [prompt, ("known", ["a@3"]), ("draft", [".96@4", ".76@5"]), ("mask", [f"0@{i}" for i in range(6, 9)])],
        ),
    ]
    note = (
        "Small numbers: position in the text. Rows 1 and 3 are forwards over the whole canvas, in both directions. "
        "A draft's weight: tanh(n) with n known tokens among the five positions around. The largest product of "
        "weight and confidence is unmasked. Grey: prompt. Dashed: mask. Green: unmasked."
    )
    draw_steps("convolution.svg", "Two steps of convolutional decoding", steps, note)


def preference() -> None:
    """Draw a sample of R2FT whose rejected text repeats the two tokens before the cut."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    known = ("known", ["a@3", "b@4", "c@5"])
    steps = [
        ("sample, cut after position 5", [prompt, known, ("draft", ["d@6", "e@7", "f@8", "$@9"])]),
        ("input: everything after is masked", [prompt, known, ("mask", [f"M@{i}" for i in range(6, 10)])]),
        ("preferred: the text", [prompt, known, ("draft", ["d@6", "e@7", "f@8", "$@9"])]),
        ("rejected: a repetition of b c", [prompt, known, ("rejected", ["c@6", "b@7", "c@8", "b@9"])]),
    ]
    note = "One forward of the input scores both. The repetition's length and phase are drawn."
    draw_steps("r2ft.svg", "A sample of R2FT", steps, note)


def speculation() -> None:
    """Draw a round of SelfSpeculative in a single forward, with two drafts."""
    text_so_far = ("prompt", ["Who@0", "is@1", "?@2"])
    groups = [("mask", [f"M@{i}", f"M@{i + 1}"]) for i in (4, 5, 6)]
    steps = [
        ("1  last token, drafts, mask groups", [text_so_far, ("known", ["a@3"]), ("draft", ["b@4", "x@5"]), *groups]),
        ("2  the model's own next tokens", [text_so_far, ("known", ["a@3", "b@4", "c@5"]), ("rejected", ["x@5"])]),
        (
            "3  the group after one draft",
            [text_so_far, ("known", ["a@3", "b@4", "c@5"]), ("draft", ["d@6", "e@7"])],
        ),
    ]
    note = (
        "Group j attends to the text and to the first j drafts only, as if exactly j were accepted. A mask drafts "
        "the token after its position. One draft (b) is accepted, the model's own token (c) follows, so the second "
        "group's drafts (d, e) are verified by the next forward. Red: rejected. Green: the model's own text."
    )
    draw_steps("self_speculative.svg", "One round of SelfSpeculative", steps, note, width=860)


def bonus() -> None:
    """Draw two forwards of ReFusion with bonus tokens and two open slots of three tokens."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    steps = [
        (
            "1  verify two open slots",
            [prompt, ("known", ["a@3"]), ("draft", ["x@4", "y@5"]), ("known", ["g@9"]), ("draft", ["h@10", "z@11"])],
        ),
        ("   and masks after each acceptance", [("mask", ["M@4", "M@5"]), ("mask", ["M@10", "M@11"])]),
        (
            "2  own tokens, new drafts",
            [prompt, ("known", ["a@3", "b@4"]), ("draft", ["c@5"]), ("known", ["g@9", "h@10", "i@11"])],
        ),
        (
            "3  feed what is new, and masks",
            [prompt, ("known", ["b@4"]), ("draft", ["c@5"]), ("known", ["i@11"]), ("mask", ["M@6", "M@7", "M@8"])],
        ),
    ]
    note = (
        "Slots see the prompt and themselves. x is rejected: the model's own token b takes its place. The masks at "
        "4 and 5 stood after no acceptance: the second one drafts c. h is accepted, z replaced. In row 3 the next "
        "plan rides along: it counts if c is accepted."
    )
    draw_steps("bonus.svg", "Two forwards of ReFusion with bonus tokens", steps, note, width=760)


def dual_cache() -> None:
    """Draw two forwards of Fast-dLLM's dual cache with blocks of three tokens."""
    prompt = ["Who@0", "is@1", "?@2"]
    masks = [f"M@{i}" for i in range(3, 9)]
    steps = [
        ("1  feed the whole canvas, cache it", [("prompt", prompt), ("mask", masks[:3]), ("mask", masks[3:])]),
        (
            "2  unmask above the threshold",
            [("prompt", prompt), ("draft", ["a@3"]), ("mask", masks[1:2]), ("draft", ["c@5"]), ("mask", masks[3:])],
        ),
        ("3  feed the block alone", [("draft", ["a@3"]), ("mask", masks[1:2]), ("draft", ["c@5"])]),
        (
            "4  the block is full: next block",
            [("prompt", prompt), ("known", ["a@3", "b@4", "c@5"]), ("mask", masks[3:])],
        ),
    ]
    note = (
        "Rows 1, 3 and 4 are forwards, in both directions. In row 3 the block attends to cached entries of all "
        "other tokens, which were computed when the block was still masked: an approximation. cache: prefix reuses "
        "the left part only. Row 4 renews the cache. Grey: prompt. Dashed: mask. Yellow: unmasked. Green: finished."
    )
    draw_steps("fast_dllm.svg", "One block of Fast-dLLM with the dual cache", steps, note)


def block_diffusion() -> None:
    """Draw three forwards of block diffusion with blocks of three tokens."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    masks = [f"M@{i}" for i in range(3, 9)]
    steps = [
        ("1  feed a block of masks", [prompt, ("mask", masks[:3])]),
        ("2  unmask above the threshold", [prompt, ("draft", ["a@3"]), ("mask", masks[1:2]), ("draft", ["c@5"])]),
        ("3  feed the block again", [prompt, ("draft", ["a@3", "b@4", "c@5"])]),
        ("4  feed it clean with the next block", [prompt, ("known", ["a@3", "b@4", "c@5"]), ("mask", masks[3:])]),
    ]
    note = (
        "A token attends to its own block, in both directions, and to the KV cache of all blocks before it. Row 4 "
        "stores the finished block, exactly, as nothing later changes it. Dashed: mask. Yellow: unmasked. Green: "
        "cached."
    )
    draw_steps("block_diffusion.svg", "One block of block diffusion", steps, note)


def objectives() -> None:
    """Draw the training input of Hybrid, Masked and BlockMasked on one sample, and where the loss is taken."""
    prompt = ("prompt", ["Who@0", "is@1", "?@2"])
    clean = ["a@3", "b@4", "c@5", "d@6", "e@7", "f@8"]
    parts = [
        row(10, "sample", [prompt, ("known", clean[:2]), ("known", clean[2:4]), ("known", clean[4:])]),
        row(62, "Hybrid: causal, in this order", [prompt, ("known", clean[4:]), ("known", clean[:2]),
                                                  ("mask", ["M@5", "M@6"])]),
        row(98, "  loss", [("prompt", ["", "", ""]), ("draft", ["f", ""]), ("draft", ["b", ""]),
                            ("draft", ["c", "d"])]),
        row(150, "Masked: bidirectional", [prompt, ("known", clean[:1]), ("mask", ["M@4", "M@5"]),
                                           ("known", clean[3:5]),
                                           ("mask", ["M@8"])]),
        row(186, "  loss", [("prompt", ["", "", ""]), ("draft", [""]), ("draft", ["b", "c"]), ("draft", ["", ""]),
                            ("draft", ["f"])]),
        row(238, "BlockMasked: block-causal", [prompt, ("mask", ["M@3"]), ("known", clean[1:2]),
                                               ("mask", ["M@5", "M@6"]),
                                               ("known", clean[4:5]), ("mask", ["M@8"])]),
        row(274, "  loss", [("prompt", ["", "", ""]), ("draft", ["a"]), ("draft", [""]), ("draft", ["c", "d"]),
                            ("draft", [""]), ("draft", ["f"])]),
        text(8, 330, "Hybrid masks whole slots and learns from every token: clean slots by next-token prediction, "
                     "masked slots by their", 12),
        text(8, 346, "own tokens. Masked and BlockMasked learn from masked tokens only; for BlockMasked, earlier "
                     "blocks are clean.", 12),
    ]  # fmt: skip
    picture("objectives.svg", 700, 358, "Hybrid, Masked and BlockMasked on one sample", parts)


PICTURES = (
    decoding,
    glossary,
    window,
    search,
    groups,
    blocks,
    strides,
    causal_blocks,
    linear_speculation,
    canvas,
    block_drafter,
    pipeline,
    editing,
    sets,
    verification,
    training,
    attention,
    convolution,
    preference,
    speculation,
    bonus,
    dual_cache,
    block_diffusion,
    objectives,
)

if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    TARGET.mkdir(exist_ok=True)
    for draw in PICTURES:
        draw()
