"""The merge module against its formula, and what must not change its output (RELIABILITY 8)."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch

from umim_core.errors import ConfigError
from umim_core.merging.module import MAX_SPAN, MergeModule, Positions

BOTH = pytest.mark.parametrize("positions", ["none", "learned"])


def module_of(
    size: int = 16,
    heads: int = 4,
    positions: Positions = "none",
    dtype: torch.dtype = torch.float32,
) -> MergeModule:
    module = MergeModule(size, heads, positions)
    generator = torch.Generator().manual_seed(4)
    module.initialise(0.7, generator)
    with torch.no_grad():
        module.query.normal_(0.0, 1.0, generator=generator)  # far from uniform attention
        module.norm_o.bias.normal_(0.0, 0.1, generator=generator)
        if module.offset is not None:
            module.offset.normal_(0.0, 1.0, generator=generator)
    return module.to(dtype).requires_grad_(False)


def spans_of(count: int, width: int, size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(count, width, size, generator=generator)


def layer_norm(x: list[float], norm: torch.nn.LayerNorm) -> list[float]:
    mean = sum(x) / len(x)
    variance = sum((v - mean) ** 2 for v in x) / len(x)
    return [
        float(g) * (v - mean) / math.sqrt(variance + 1e-5) + float(b)
        for v, g, b in zip(x, norm.weight, norm.bias, strict=True)
    ]


def gelu_of_linear(x: list[float], linear: torch.nn.Linear) -> list[float]:
    rows = zip(linear.weight.tolist(), linear.bias.tolist(), strict=True)
    z = [sum(w * v for w, v in zip(row, x, strict=True)) + bias for row, bias in rows]
    return [0.5 * v * (1.0 + math.erf(v / math.sqrt(2.0))) for v in z]


def pooled_by_hand(module: MergeModule, span: list[list[float]]) -> list[float]:
    """The formula of the paper for one span, scalar by scalar."""
    if module.offset is not None:
        offsets = module.offset.tolist()
        span = [[v + o for v, o in zip(e, offsets[t], strict=True)] for t, e in enumerate(span)]
    projected = [layer_norm(gelu_of_linear(e, module.linear_kv), module.norm_kv) for e in span]
    width = module.hidden_size // module.num_heads
    joined: list[float] = []
    for head, query in enumerate(module.query.tolist()):
        part = [p[head * width : (head + 1) * width] for p in projected]
        scores = [
            sum(a * b for a, b in zip(p, query, strict=True)) / math.sqrt(width) for p in part
        ]
        weights = [math.exp(s) / sum(map(math.exp, scores)) for s in scores]
        joined += [sum(a * p[k] for a, p in zip(weights, part, strict=True)) for k in range(width)]
    return layer_norm(gelu_of_linear(joined, module.linear_o), module.norm_o)


@BOTH
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_equals_the_formula_in_plain_arithmetic(
    positions: Positions, length: int, torch_rng: torch.Generator
) -> None:
    module = module_of(8, 2, positions, torch.float64)
    span = spans_of(1, length, 8, torch_rng).double()
    got = module(span, torch.tensor([length]))[0]
    want = torch.tensor(pooled_by_hand(module, span[0].tolist()), dtype=torch.float64)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("size", "heads"), [(4, 4), (16, 4), (64, 1), (128, 8), (256, 4)])
def test_has_exactly_the_parameters_of_the_paper(size: int, heads: int) -> None:
    def count(module: MergeModule) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    assert count(MergeModule(size, heads)) == 2 * size * size + 7 * size
    assert count(MergeModule(size, heads, "learned")) == 2 * size * size + (7 + MAX_SPAN) * size


@BOTH
def test_what_padding_contains_never_changes_a_bit(
    positions: Positions, torch_rng: torch.Generator
) -> None:
    module = module_of(positions=positions)
    spans, lengths = spans_of(9, 4, 16, torch_rng), torch.tensor([1, 2, 3, 4, 2, 3, 1, 4, 2])
    want = module(spans, lengths)
    padding = torch.arange(4) >= lengths[:, None]
    for filler in (0.0, 1e30, math.inf, -math.inf, math.nan):
        other = torch.where(padding[..., None], torch.tensor(filler), spans)
        assert torch.equal(module(other, lengths), want)
    assert bool(want.isfinite().all())


@BOTH
@pytest.mark.parametrize("length", [1, 2, 3])
def test_how_wide_padding_is_changes_at_most_rounding(
    positions: Positions, length: int, torch_rng: torch.Generator
) -> None:
    module = module_of(positions=positions)
    spans, lengths = spans_of(5, 4, 16, torch_rng), torch.full((5,), length)
    want = module(spans[:, :length], lengths)
    for width in range(length + 1, 5):
        got = module(spans[:, :width], lengths)
        assert torch.allclose(got, want, rtol=0, atol=1e-6)


@BOTH
def test_a_batch_equals_its_spans_alone(positions: Positions, torch_rng: torch.Generator) -> None:
    module = module_of(positions=positions)
    spans, lengths = spans_of(7, 4, 16, torch_rng), torch.tensor([2, 4, 3, 2, 4, 1, 3])
    together = module(spans, lengths)
    for m, length in enumerate(lengths.tolist()):
        alone = module(spans[m : m + 1, :length], lengths[m : m + 1])
        assert torch.allclose(together[m], alone[0], rtol=0, atol=1e-6)


def test_the_form_of_the_paper_does_not_see_the_order(torch_rng: torch.Generator) -> None:
    module, span = module_of(), spans_of(1, 4, 16, torch_rng)
    want = module(span, torch.tensor([4]))
    for order in permutations(range(4)):
        assert torch.allclose(module(span[:, list(order)], torch.tensor([4])), want, atol=1e-6)


def test_the_form_of_the_paper_does_not_see_how_often_one_token_is_repeated(
    torch_rng: torch.Generator,
) -> None:
    module, token = module_of(), spans_of(1, 1, 16, torch_rng)
    twice, thrice = (module(token.expand(1, n, 16), torch.tensor([n])) for n in (2, 3))
    assert torch.allclose(twice, thrice, rtol=0, atol=1e-6)


def test_learned_positions_see_order_and_repetition(torch_rng: torch.Generator) -> None:
    module, span = module_of(positions="learned"), spans_of(1, 2, 16, torch_rng)
    two, token = torch.tensor([2]), span[:, :1]
    assert not torch.allclose(module(span, two), module(span.flip(1), two), atol=1e-2)
    twice, thrice = (module(token.expand(1, n, 16), torch.tensor([n])) for n in (2, 3))
    assert not torch.allclose(twice, thrice, atol=1e-2)


def test_learned_positions_begin_as_the_form_of_the_paper(torch_rng: torch.Generator) -> None:
    plain, learned = MergeModule(16), MergeModule(16, positions="learned")
    for module in (plain, learned):
        module.initialise(0.5, torch.Generator().manual_seed(8))
    spans, lengths = spans_of(6, 3, 16, torch_rng), torch.tensor([1, 2, 3, 3, 2, 1])
    assert torch.equal(plain(spans, lengths), learned(spans, lengths))


@BOTH
def test_initialise_gives_outputs_the_scale_of_the_embeddings(
    positions: Positions, torch_rng: torch.Generator
) -> None:
    module = MergeModule(64, 4, positions)
    module.initialise(0.043, torch_rng)
    out = module(0.043 * spans_of(200, 4, 64, torch_rng), torch.full((200,), 3))
    assert out.std().item() == pytest.approx(0.043, rel=0.05)
    assert out.mean(dim=1).abs().max().item() < 1e-5
    assert module.norm_o.bias.count_nonzero() == 0
    assert module.query.std().item() == pytest.approx(0.02, rel=0.3)


def test_initialise_is_decided_by_its_generator_alone() -> None:
    modules = [MergeModule(16) for _ in range(3)]
    before = torch.get_rng_state()
    for module, seed in zip(modules, (1, 1, 2), strict=True):
        module.initialise(0.1, torch.Generator().manual_seed(seed))
    assert torch.equal(torch.get_rng_state(), before)
    first, second, third = (torch.cat([p.flatten() for p in m.parameters()]) for m in modules)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@BOTH
def test_every_parameter_gets_a_gradient(positions: Positions, torch_rng: torch.Generator) -> None:
    module = module_of(positions=positions).requires_grad_(True)
    out = module(spans_of(5, 4, 16, torch_rng), torch.tensor([1, 2, 3, 4, 4]))
    (out * torch.randn(out.shape, generator=torch_rng)).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
        assert parameter.grad.abs().max() > 0, name


def test_no_spans_give_no_surrogates() -> None:
    out = module_of()(torch.zeros(0, 3, 16), torch.zeros(0, dtype=torch.int64))
    assert out.shape == (0, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_spans_of_another_type_are_taken_in_the_type_of_the_module(
    dtype: torch.dtype, torch_rng: torch.Generator
) -> None:
    module, spans = module_of(), spans_of(3, 2, 16, torch_rng).to(dtype)
    out = module(spans, torch.tensor([2, 2, 1]))
    assert out.dtype is torch.float32
    assert torch.equal(out, module(spans.float(), torch.tensor([2, 2, 1])))


@pytest.mark.parametrize(("size", "heads"), [(16, 3), (16, 0), (16, -4), (0, 1), (2, 4)])
def test_heads_that_do_not_divide_the_size_are_refused(size: int, heads: int) -> None:
    with pytest.raises(
        ConfigError, match=f"must divide hidden_size; got {heads} heads, size {size}"
    ):
        MergeModule(size, heads)


def test_an_unknown_position_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="positions must be 'none' or 'learned'; got rotary"):
        MergeModule(16, 4, "rotary")  # type: ignore[arg-type]
