"""The attention masks that other tests compare with, against their definition."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion_lit.types import ModelTraits
from support.attention_masks import order_mask, pattern_order


@given(data=st.data(), rows=st.integers(1, 3), length=st.integers(1, 7))
def test_a_token_sees_real_tokens_of_no_higher_order(data: st.DataObject, rows: int, length: int) -> None:
    order = st.lists(st.integers(0, 3), min_size=length, max_size=length)
    orders = data.draw(st.lists(order, min_size=rows, max_size=rows))
    lengths = data.draw(st.lists(st.integers(0, length), min_size=rows, max_size=rows))
    mask = order_mask(torch.tensor(orders), torch.tensor(lengths)).tolist()
    for row in range(rows):
        for query in range(length):
            for key in range(length):
                sees = key < lengths[row] and orders[row][key] <= orders[row][query]
                assert mask[row][query][key] == (sees or key == query)


def test_orders_of_the_attention_patterns() -> None:
    positions = torch.tensor([[0, 1, 6, 7, 2, 3]])
    assert pattern_order(ModelTraits(), positions).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert pattern_order(ModelTraits(attention="bidirectional"), positions).tolist() == [[0] * 6]
    blocks = ModelTraits(attention="block_causal", block_size=4)
    assert pattern_order(blocks, positions).tolist() == [[0, 0, 1, 1, 0, 0]]
