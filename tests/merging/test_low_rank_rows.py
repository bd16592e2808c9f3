"""The one-pass addition of low-rank products equals the products of torch, rounded once."""

import pytest
import torch

from umim_core.merging.low_rank_rows import add_low_rank


@pytest.mark.parametrize("rank", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [0, 1, 4, 7])
def test_given_rows_gain_their_products_and_no_other_row_changes(rank: int, size: int) -> None:
    draw = torch.Generator().manual_seed(rank)
    n, o = (10, 13) if size % 2 else (13, 10)
    x, out = (torch.randn(9, width, generator=draw).bfloat16() for width in (n, o))
    down, up = torch.randn(n, rank, generator=draw), torch.randn(rank, o, generator=draw)
    rows = torch.randperm(9, generator=draw)[:size]
    expected = out.double()
    expected[rows] += x[rows].double() @ down.double() @ up.double()
    add_low_rank(out, x, rows, down, up)
    assert torch.allclose(out.double(), expected, rtol=2**-8, atol=1e-5)
    untouched = [row for row in range(9) if row not in rows]
    assert torch.equal(out[untouched].double(), expected[untouched])
    with pytest.raises(ValueError, match="sizes or types do not fit"):
        add_low_rank(out, x.float(), rows, down, up)
    with pytest.raises(IndexError):
        add_low_rank(out, x, torch.tensor([9]), down, up)
