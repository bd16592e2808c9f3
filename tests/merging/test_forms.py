"""Every form of the merge module: formulas, and what may change its output (reliability 8)."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from support.merge_modules import FORMS, give_rows, module_of
from umim_core.config.form import ModuleForm
from umim_core.errors import ConfigError
from umim_core.merging.module import ANCHORS, MergeModule, exponential_embedding, last_embedding

EVERY = pytest.mark.parametrize("form", FORMS)
ALONE = pytest.mark.parametrize("form", [f for f in FORMS if "residual" not in FORMS[f]])
RESIDUAL = pytest.mark.parametrize("form", [f for f in FORMS if "residual" in FORMS[f]])
MODULES = {form: module_of(form) for form in FORMS}
DOUBLE = {form: module_of(form, dtype=torch.float64) for form in FORMS}
LENGTHS = st.lists(st.integers(1, 4), min_size=1, max_size=9)
FILLERS = st.sampled_from([0.0, 1e30, math.inf, -math.inf, math.nan])


def drawn(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 4, 16, generator=torch.Generator().manual_seed(seed))


@EVERY
@given(lengths=LENGTHS, filler=FILLERS, seed=st.integers(0, 99))
def test_what_padding_contains_never_changes_a_bit(
    form: str, lengths: list[int], filler: float, seed: int
) -> None:
    module, spans, sizes = MODULES[form], drawn(len(lengths), seed), torch.tensor(lengths)
    want = module(spans, sizes)
    padding = torch.arange(4) >= sizes[:, None]
    other = torch.where(padding[..., None], torch.tensor(filler), spans)
    assert torch.equal(module(other, sizes), want)
    assert bool(want.isfinite().all())


@EVERY
def test_what_padding_contains_never_changes_a_bit_of_the_gradient(
    form: str, torch_rng: torch.Generator
) -> None:
    spans, lengths = torch.randn(4, 4, 16, generator=torch_rng), torch.tensor([1, 2, 3, 4])
    padding = torch.arange(4) >= lengths[:, None]
    found = []
    for filler in (0.0, math.nan):
        module = copy.deepcopy(MODULES[form]).requires_grad_(True)
        other = torch.where(padding[..., None], torch.tensor(filler), spans)
        module(other, lengths).pow(2).sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


@EVERY
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_a_batch_equals_its_spans_alone(form: str, lengths: list[int], seed: int) -> None:
    module, sizes = DOUBLE[form], torch.tensor(lengths)
    spans = drawn(len(lengths), seed).double()
    together = module(spans, sizes)
    for m, length in enumerate(lengths):
        alone = module(spans[m : m + 1, :length], sizes[m : m + 1])
        assert torch.allclose(together[m], alone[0], rtol=0, atol=1e-12)


@ALONE
def test_initialise_gives_outputs_the_scale_of_the_embeddings(
    form: str, torch_rng: torch.Generator
) -> None:
    module = MergeModule(64, ModuleForm(**FORMS[form]))
    module.initialise(0.043, torch_rng)
    out = module(0.043 * torch.randn(200, 4, 64, generator=torch_rng), torch.full((200,), 3))
    assert out.std().item() == pytest.approx(0.043, rel=0.05)
    assert out.mean(dim=1).abs().max().item() < 1e-5
    assert module.norm_o.bias.count_nonzero() == 0


@RESIDUAL
def test_an_untrained_residual_module_gives_the_anchor_itself(
    form: str, torch_rng: torch.Generator
) -> None:
    module = MergeModule(64, ModuleForm(**FORMS[form]))
    module.initialise(0.043, torch_rng)
    spans, lengths = torch.randn(8, 4, 64, generator=torch_rng), torch.arange(8) % 4 + 1
    assert torch.equal(module(spans, lengths), ANCHORS[module.form.residual](spans, lengths))


def normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)


def attended(layer: nn.Module, heads: int, span: Tensor) -> Tensor:
    """One pre-norm layer of self-attention, head by head."""
    wide = layer.linear_qkv(normed(span, layer.norm)).chunk(3, dim=1)
    mixed = [
        (queries @ keys.T / keys.shape[1] ** 0.5).softmax(1) @ values
        for queries, keys, values in zip(*(part.chunk(heads, 1) for part in wide), strict=True)
    ]
    return span + layer.linear_o(torch.cat(mixed, 1))


@torch.no_grad()
def formula(module: MergeModule, span: Tensor) -> Tensor:
    """The surrogate [d] of a span [n, d] alone, without padding and masks."""
    gelu, tokens = functional.gelu, len(span)
    if module.form.kind == "linear":
        missing = module.hidden_size * (module.longest - tokens)
        joined = functional.pad(span.flatten(), (0, missing))
        return normed(module.linear_o(joined), module.norm_o)
    if module.form.module_positions != "none":  # long spans count their offsets from the end
        span = span + (
            module.offset[:tokens].flip(0) if module.longest > 4 else module.offset[:tokens]
        )
    for layer in getattr(module, "layers", ()):
        span = attended(layer, module.num_heads, span)
    pairs = normed(gelu(module.linear_kv(span)), module.norm_kv).chunk(module.num_heads, 1)
    pooled = [
        (part @ query / len(query) ** 0.5).softmax(0) @ part
        for query, part in zip(module.query, pairs, strict=True)
    ]
    return normed(gelu(module.linear_o(torch.cat(pooled))), module.norm_o)


@ALONE
@pytest.mark.parametrize(
    ("length", "longest"), [(1, 4), (2, 4), (3, 4), (4, 4), (1, 9), (4, 9), (9, 9)]
)
def test_equals_the_formula_of_a_span_alone(
    form: str, length: int, longest: int, torch_rng: torch.Generator
) -> None:
    module = module_of(form, 8, 2, torch.float64, longest)
    span = torch.randn(1, length, 8, generator=torch_rng).double()
    want = formula(module, span[0])
    for width in (length, longest):  # padded
        wide = torch.nn.functional.pad(span, (0, 0, 0, width - length))
        found = module(wide, torch.tensor([length]))[0]
        assert torch.allclose(found, want, rtol=0, atol=1e-12)


TABLE = {
    "paper": (2, 7), "learned": (2, 11), "depth 3": (10, 19), "depth 3, learned": (10, 23),
    "linear": (4, 3),
}  # fmt: skip


@pytest.mark.parametrize("form", TABLE)
@pytest.mark.parametrize(("size", "heads"), [(4, 4), (64, 1)])
def test_has_exactly_the_parameters_of_its_table(form: str, size: int, heads: int) -> None:
    count = sum(p.numel() for p in MergeModule(size, ModuleForm(**FORMS[form]), heads).parameters())
    squares, singles = TABLE[form]
    assert count == squares * size * size + singles * size


def uniform(layer: nn.Linear, bound: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Draw weight, then bias, as a linear layer is initialised."""
    shapes = layer.weight.shape, layer.bias.shape
    return tuple(torch.empty(s).uniform_(-bound, bound, generator=generator) for s in shapes)


def test_weights_are_drawn_in_this_order_the_layers_behind_the_pooling() -> None:
    forms = ({}, {"depth": 3}, {"kind": "linear"})
    paper, deep, simple = (MergeModule(16, ModuleForm(**form)) for form in forms)
    generator = torch.Generator().manual_seed(8)
    for module in (paper, deep, simple):
        module.initialise(0.5, torch.Generator().manual_seed(8))
    weight, _ = uniform(simple.linear_o, 0.125, torch.Generator().manual_seed(8))
    assert torch.equal(simple.linear_o.weight, weight)
    for layer in (paper.linear_kv, paper.linear_o):
        weight, bias = uniform(layer, 0.25, generator)
        assert torch.equal(layer.weight, weight)
        assert torch.equal(layer.bias, bias)
    assert torch.equal(paper.query, torch.empty(4, 4).normal_(0.0, 0.02, generator=generator))
    state = deep.state_dict()
    for name, value in paper.state_dict().items():
        assert torch.equal(state[name], value), name
    for layer in deep.layers:
        for linear_map, scale in ((layer.linear_qkv, 1.0), (layer.linear_o, 0.5)):
            weight, bias = uniform(linear_map, 0.25, generator)
            assert torch.equal(linear_map.weight, scale * weight)
            assert torch.equal(linear_map.bias, scale * bias)


@ALONE
@pytest.mark.parametrize("longest", [4, 9])
def test_autocast_changes_rounding_alone(
    form: str, longest: int, torch_rng: torch.Generator
) -> None:
    module = module_of(form, longest=longest).requires_grad_()
    spans, lengths = torch.randn(9, longest, 16, generator=torch_rng), torch.arange(9) % longest + 1
    with torch.autocast("cpu", torch.bfloat16):
        found = module(spans, lengths)
    assert torch.allclose(found.float(), module(spans, lengths), rtol=0, atol=0.1)
    found.float().pow(2).sum().backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in module.parameters())


SIZES = torch.tensor([1, 2, 3, 4])


def test_anchors_are_the_last_token_and_weights_that_double(torch_rng: torch.Generator) -> None:
    spans = torch.randn(4, 4, 8, generator=torch_rng).double()
    one, two, three, four = spans
    want = torch.stack(
        [
            one[0],
            (two[0] + 2 * two[1]) / 3,
            (three[0] + 2 * three[1] + 4 * three[2]) / 7,
            (four[0] + 2 * four[1] + 4 * four[2] + 8 * four[3]) / 15,
        ]
    )
    assert torch.allclose(exponential_embedding(spans, SIZES), want, rtol=0, atol=1e-12)
    last = torch.stack([one[0], two[1], three[2], four[3]])
    assert torch.equal(last_embedding(spans, SIZES), last)


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("form", [{}, {"depth": 3}, {"kind": "linear"}], ids=str)
def test_a_residual_module_adds_its_own_output_to_the_anchor(
    anchor: Any, form: dict[str, Any], torch_rng: torch.Generator
) -> None:
    alone, added = (
        MergeModule(16, ModuleForm(**form, residual=residual)) for residual in ("none", anchor)
    )
    alone.initialise(0.1, torch_rng)
    added.load_state_dict(alone.state_dict())
    spans = torch.randn(4, 4, 16, generator=torch_rng)
    want = ANCHORS[anchor](spans, SIZES) + alone(spans, SIZES)
    assert torch.allclose(added(spans, SIZES), want, rtol=0, atol=1e-6)


@EVERY
def test_gradients_of_the_spans_are_those_of_finite_differences(
    form: str, torch_rng: torch.Generator
) -> None:
    module = module_of(form, 8, 2, torch.float64)
    spans = torch.randn(3, 4, 8, generator=torch_rng).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: module(x, torch.tensor([2, 3, 4])), (spans,))


@pytest.mark.parametrize(("size", "heads"), [(16, 3), (16, 0), (16, -4), (0, 1), (2, 4)])
def test_heads_that_do_not_divide_the_size_are_refused(size: int, heads: int) -> None:
    with pytest.raises(ConfigError, match=f"divide hidden_size; got {heads} heads, size {size}"):
        MergeModule(size, num_heads=heads)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"module_positions": "rotary"}, "positions must be 'none' or 'learned'; got rotary"),
        ({"depth": 2}, "depth must be 1 or 3; got 2"),
        ({"residual": "first"}, "residual must be 'none', 'last' or 'exponential'; got first"),
        ({"kind": "mean"}, "kind must be 'attention' or 'linear'; got mean"),
        ({"kind": "linear", "module_positions": "learned"}, "linear .* must have positions"),
        ({"kind": "linear", "depth": 3}, "linear merge module must have .* depth 1"),
        ({"merge_depth": 1}, "residual 'last'"),
        ({"merge_depth": 1, "residual": "last"}, "unit_positions 'preserved'"),
        ({"merge_depth": -1}, "merge_depth must be at least 0; got -1"),
        ({"adapter_rank": 257}, "adapter_rank must be at most 256; got 257"),
    ],
)
def test_a_form_that_does_not_exist_is_refused(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModuleForm(**form)


def test_a_digest_stands_for_form_weights_and_data_type() -> None:
    module = MergeModule(8)
    module.initialise(0.2, torch.Generator().manual_seed(0))
    same = MergeModule(8)
    same.load_state_dict(module.state_dict())
    assert same.digest() == module.digest()
    other = MergeModule(8, ModuleForm(module_positions="learned"))
    other.load_state_dict(module.state_dict(), strict=False)
    with torch.no_grad():
        next(same.parameters()).view(-1)[0] += 1e-3
    digests = {module.digest(), same.digest(), other.digest()}
    for residual in ("last", "exponential"):
        anchored = MergeModule(8, ModuleForm(residual=residual))
        anchored.load_state_dict(module.state_dict())
        digests.add(anchored.digest())
    long = MergeModule(8, longest=5)
    long.load_state_dict(module.state_dict())
    digests |= {long.digest(), module.bfloat16().digest()}
    rowed, other, moved = (
        give_rows(module_of("paper"), rows) for rows in ([(7, 8)], [(7, 9)], [(7, 8)])
    )
    with torch.no_grad():
        moved.rows.table[0, 3] += 1.0
    digests |= {each.digest() for each in (module_of("paper"), rowed, other, moved)}
    assert len(digests) == 11


@pytest.mark.parametrize(
    ("options", "digest"),
    [
        ({}, "3868ff43e07f2f521a48c1eeed216f8e"),
        ({"form": ModuleForm(residual="last")}, "6f8a7cbd96625fc247e5f60445988b51"),
        ({"longest": 16}, "6661afd8e9f166a5e0a7ce932192a7d1"),
    ],
)
def test_digests_stay_those_that_damage_tables_name(options: dict[str, Any], digest: str) -> None:
    module = MergeModule(16, **options)
    for value in module.state_dict().values():
        value.fill_(0.5)
    assert module.digest().startswith(digest)
