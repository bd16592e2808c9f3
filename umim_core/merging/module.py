"""The merge module: a span's embeddings become one surrogate embedding.

``MergeModule(d)`` is the paper's attention pooling. Positions, depth and kind of a ``ModuleForm``
choose another, the last two a class of its own:

=======================  ================================  ================  ================
form                     policies                          parameters        sees the order
=======================  ================================  ================  ================
``MergeModule``          the default                       2 d^2 + 7 d       no
                         positions learned                 2 d^2 + 11 d      yes
``ContextualPooling``    depth 3                           10 d^2 + 19 d     no
                         depth 3, positions learned        10 d^2 + 23 d     yes
``LinearMerge``          kind linear                       4 d^2 + 3 d       yes
``RuleRows``             rule_rows K, of any form          K d more          of K rules
=======================  ================================  ================  ================

Of rules of up to L tokens, more than 4, positions learned take L d parameters and kind linear
L d^2 + 3 d.

Shapes: M spans, N tokens in the longest span, d embedding size, h heads, d_h = d / h.

    P   = LN_kv(GELU(Linear_kv(E)))                 [M, N, d], per token
    a_i = softmax(P_i q_i / sqrt(d_h))              [M, N], per head, over the span
    o_i = sum_t a_i[t] P_i[t]                       [M, d_h]
    z   = LN_o(GELU(Linear_o([o_1; ...; o_h])))     [M, d]

Source: paper, "Module Architecture and Integration". The linear form is ours, a control of
attention pooling; the paper names depth 3, its layers (pre-norm, no feed-forward part) are ours.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from umim_core.config.form import PAPER, PAPER_FORM, ModuleForm
from umim_core.errors import ConfigError, require
from umim_core.merging.adapters import SpanAdapters
from umim_core.merging.packing import inside_spans
from umim_core.merging.rule_rows import RuleRows
from umim_core.rules.grams import LONGEST, MAX_LONGEST, check_longest
from umim_core.rules.ruleset import RuleSet
from umim_core.store.artifacts import canonical_json


class MergeModule(nn.Module):
    """Make one embedding of a span of token embeddings.

    It is the paper's form: every token is projected on its own, then the span is pooled, with
    2 d^2 + 7 d parameters. Without positions it sees neither order nor repetition. ``learned`` adds
    one vector per offset to the embeddings, ``longest`` x d parameters that begin at zero; offsets
    count from the first token, where spans may have more than four from the last. With a residual
    the module adds to an anchor, such as the span's last embedding; LN_o's gain then begins at
    zero, so that an untrained module gives the anchor itself.

    The other forms are its subclasses. ``MergeModule(...)`` returns the one that is asked for, as
    ``pathlib.Path`` gives the class of the system. The embedding size is d, a
    multiple of the heads; ``umim_core.config.form`` has the policies.

    Attributes:
        norm_o: The last layer of every form, at the scale of the backbone's embeddings.
        rows: Offsets of single rules, added to the surrogates of every form; None: there are none.
        adapters: Gated adapters of the layers that read units, trained and saved with the module;
            None: there are none.
    """

    norm_o: nn.LayerNorm
    offset: nn.Parameter | None
    rows: RuleRows | None
    adapters: SpanAdapters | None

    def __new__(
        cls,
        hidden_size: int = 0,
        form: ModuleForm = PAPER_FORM,
        num_heads: int = 4,
        longest: int = LONGEST,
    ) -> Self:
        own: Any = cls
        if cls is MergeModule:  # a copy has no form, and its own class
            forms = {("linear", 1): LinearMerge, (PAPER, 3): ContextualPooling}
            own = forms.get((form.kind, form.depth), cls)
        made: Self = super().__new__(own)
        return made

    def __init__(
        self,
        hidden_size: int,
        form: ModuleForm = PAPER_FORM,
        num_heads: int = 4,
        longest: int = LONGEST,
    ) -> None:
        """Make a module of a form, its weights not drawn yet, without rule rows and adapters.

        The backbone's embedding size is d; the heads must divide it. ``longest`` is of its rules.
        """
        super().__init__()
        fits = hidden_size > 0 < num_heads and hidden_size % num_heads == 0
        sizes, remedy = f"{num_heads} heads, size {hidden_size}", "Choose a divisor."
        require(fits, ConfigError, "num_heads must divide hidden_size", sizes, remedy)
        self.hidden_size, self.num_heads, self._form = hidden_size, num_heads, form
        self.longest = check_longest(longest)
        self.rows, self.adapters, self.offset = None, None, None
        self.make_weights()

    @property
    def form(self) -> ModuleForm:
        """The form, with as many rule rows and adapters of the rank as there are."""
        attached = {
            "rule_rows": 0 if self.rows is None else len(self.rows),
            "adapter_rank": 0 if self.adapters is None else self.adapters.rank,
        }
        return self._form.model_copy(update=attached)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm_o.weight.dtype

    def digest(self) -> str:
        """Return the SHA-256 of form and weights, in the data type that they have."""
        form, residual = self._form, self._form.residual
        described = [form.kind, form.depth, form.module_positions, self.num_heads, str(self.dtype)]
        if residual != "none":  # digests without one stay
            described.append(residual)
        if self.longest != LONGEST:  # likewise
            described.append(str(self.longest))
        digest = hashlib.sha256(canonical_json(described).encode())
        for name, value in sorted(self.state_dict().items()):
            digest.update(canonical_json([name, list(value.shape)]).encode())
            digest.update(value.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()

    def forward(self, spans: Tensor, lengths: Tensor, ids: Tensor | None = None) -> Tensor:
        """Merge spans of embeddings [M, N, d] of any float type with lengths [M] (int64), 1 .. N.

        What stands beyond a span's length has no influence. A module with rule rows finds them by
        token ids [M, N] (int64).

        Returns:
            Surrogate embeddings [M, d] in the module's own data type.
        """
        outside = ~inside_spans(lengths, spans.shape[1])
        tokens = spans.to(self.dtype).masked_fill(outside[..., None], 0.0)
        merged = self.merge(tokens, lengths)
        if self._form.residual != "none":
            merged = merged + ANCHORS[self._form.residual](tokens, lengths)
        return self.add_rows(merged, ids, lengths)

    def add_rows(self, merged: Tensor, ids: Tensor | None, lengths: Tensor) -> Tensor:
        out: Tensor = merged if self.rows is None else merged + self.rows(ids, lengths)
        return out

    def make_weights(self) -> None:
        """Register Linear_kv, LN_kv, q, Linear_o, LN_o and, if learned, the offsets' vectors."""
        size = self.hidden_size
        self.linear_kv = nn.Linear(size, size)
        self.norm_kv = nn.LayerNorm(size, eps=1e-5)
        self.query = nn.Parameter(torch.empty(self.num_heads, size // self.num_heads))
        self.linear_o = nn.Linear(size, size)
        self.norm_o = nn.LayerNorm(size, eps=1e-5)
        learned = self._form.module_positions == "learned"
        self.offset = nn.Parameter(torch.zeros(self.longest, size)) if learned else None
        nn.init.normal_(self.query, std=0.02)

    @torch.no_grad()
    def initialise(self, embedding_std: float, generator: torch.Generator | None = None) -> None:
        """Draw Linear_kv, Linear_o and q, in this order; without a generator by the global one.

        Without a residual LN_o's gain is the standard deviation of the backbone's embeddings.
        """
        draw_linear(self.linear_kv, generator)
        draw_linear(self.linear_o, generator)
        self.query.normal_(0.0, 0.02, generator=generator)
        reset_norm(self.norm_kv, 1.0)
        self.reset_output(embedding_std)
        if self.offset is not None:
            self.offset.zero_()

    def reset_output(self, embedding_std: float) -> None:
        """Set LN_o: at the scale of the embeddings, or at zero where an anchor is added."""
        reset_norm(self.norm_o, embedding_std if self._form.residual == "none" else 0.0)

    def merge(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Pool tokens [M, N, d], zero behind their span, to surrogates [M, d]."""
        placed = self.place(tokens, lengths)
        if self.longest == LONGEST:
            return self.pool(self.values(placed), lengths)
        inside = inside_spans(lengths, placed.shape[1])  # most spans are far shorter than N
        values = self.values(placed[inside])
        projected = values.new_zeros(placed.shape).masked_scatter(inside[..., None], values)
        return self.pool(projected, lengths)

    def place(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Add the vectors of offsets, counted from the last token where spans may be longer."""
        if self.offset is None:
            return tokens
        offsets = torch.arange(tokens.shape[1], device=tokens.device)
        if self.longest != LONGEST:
            offsets = (lengths[:, None] - 1 - offsets).clamp(min=0)
        return tokens + self.offset[offsets]

    def values(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.norm_kv(F.gelu(self.linear_kv(tokens)))
        return out

    def pool(self, projected: Tensor, lengths: Tensor) -> Tensor:
        """Pool P [M, N, d] of spans with lengths [M] to surrogates [M, d]."""
        count, width, size = projected.shape
        heads = projected.view(count, width, *self.query.shape)  # [M, N, h, d_h]
        scores = torch.einsum("mnhk,hk->mhn", heads, self.query) / math.sqrt(heads.shape[-1])
        inside = inside_spans(lengths, width)
        weights = scores.masked_fill(~inside[:, None], -torch.inf).softmax(dim=-1)
        pooled = torch.einsum("mhn,mnhk->mhk", weights, heads).reshape(count, size)
        out: Tensor = self.norm_o(F.gelu(self.linear_o(pooled)))
        return out


class SpanAttention(nn.Module):
    """One pre-norm layer of self-attention over a span: 4 d^2 + 6 d parameters.

    ::

        X <- X + Linear_o(softmax(Q K^T / sqrt(d_h)) V),  [Q; K; V] = Linear_qkv(LN(X))
    """

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(hidden_size, eps=1e-5)
        self.linear_qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.linear_o = nn.Linear(hidden_size, hidden_size)

    @torch.no_grad()
    def initialise(self, embedding_std: float, generator: torch.Generator | None) -> None:
        """Draw Linear_qkv and Linear_o; what is added starts at the scale of the embeddings."""
        draw_linear(self.linear_qkv, generator)
        draw_linear(self.linear_o, generator)
        self.linear_o.weight.mul_(embedding_std)
        self.linear_o.bias.mul_(embedding_std)
        reset_norm(self.norm, 1.0)

    def forward(self, tokens: Tensor, inside: Tensor) -> Tensor:
        """Let tokens [M, N, d] look at those ``inside`` [M, N] (bool) their own span."""
        count, width, size = tokens.shape
        split = (count, width, 3, self.num_heads, size // self.num_heads)
        queries, keys, values = self.linear_qkv(self.norm(tokens)).view(split).unbind(dim=2)
        scores = torch.einsum("mqhk,mthk->mhqt", queries, keys) / math.sqrt(split[-1])
        weights = scores.masked_fill(~inside[:, None, None], -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("mhqt,mthk->mqhk", weights, values).reshape(count, width, size)
        out: Tensor = tokens + self.linear_o(mixed)
        return out


class ContextualPooling(MergeModule):
    """Two layers of self-attention, then attention pooling: 10 d^2 + 19 d parameters.

    Without positions it sees neither order nor repetition, as the paper's form: attention weighs a
    token by what it is. Learned positions (a vector per offset) are added before the first layer.
    """

    def make_weights(self) -> None:
        super().make_weights()
        sizes = (self.hidden_size, self.num_heads)
        self.layers = nn.ModuleList(SpanAttention(*sizes) for _ in range(1, self._form.depth))

    @torch.no_grad()
    def initialise(self, embedding_std: float, generator: torch.Generator | None = None) -> None:
        """Draw the pooling exactly as depth 1 does, then the layers, the first one first."""
        super().initialise(embedding_std, generator)
        for layer in self.layers:
            assert isinstance(layer, SpanAttention)  # noqa: S101  made so above
            layer.initialise(embedding_std, generator)

    def merge(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        tokens, inside = self.place(tokens, lengths), inside_spans(lengths, tokens.shape[1])
        for layer in self.layers:
            tokens = layer(tokens, inside)
        return self.pool(self.values(tokens), lengths)


class LinearMerge(MergeModule):
    """Concatenate the embeddings, zero-padded to 4 d, and map them to d: 4 d^2 + 3 d parameters.

    ::

        z = LN_o(W [e_1; e_2; e_3; e_4] + b) = LN_o(sum_t W_t e_t + b)    missing e_t are zero

    Of rules of more tokens, ``longest`` stands for 4.

    It has a weight per offset: it sees order and repetition. Heads play no part in it.
    """

    def make_weights(self) -> None:
        self.linear_o = nn.Linear(self.longest * self.hidden_size, self.hidden_size)
        self.norm_o = nn.LayerNorm(self.hidden_size, eps=1e-5)

    @torch.no_grad()
    def initialise(self, embedding_std: float, generator: torch.Generator | None = None) -> None:
        draw_linear(self.linear_o, generator)
        self.reset_output(embedding_std)

    def merge(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Map tokens [M, N, d], zero beyond their span, to surrogates [M, d]; N at most longest."""
        count, width, size = tokens.shape
        missing = tokens.new_zeros(count, self.longest - width, size)
        joined = torch.cat([tokens, missing], dim=1).view(count, self.longest * size)
        out: Tensor = self.norm_o(self.linear_o(joined))
        return out


@dataclass(frozen=True)
class Pooling:
    """A function without weights in the place of a merge module: some baselines merge by one.

    ``pool`` makes surrogates [M, d] of spans [M, N, d] with lengths [M].
    """

    form: ClassVar[ModuleForm] = PAPER_FORM
    longest: ClassVar[int] = MAX_LONGEST
    adapters: ClassVar[None] = None

    pool: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, spans: Tensor, lengths: Tensor, ids: Tensor) -> Tensor:
        return self.pool(spans, lengths)


SpanMerger = MergeModule | Pooling


def draw_linear(linear: nn.Linear, generator: torch.Generator | None) -> None:
    """Draw a linear layer as PyTorch does by default: weight, then bias, +-1/sqrt(inputs)."""
    bound = 1.0 / math.sqrt(linear.in_features)
    linear.weight.uniform_(-bound, bound, generator=generator)
    linear.bias.uniform_(-bound, bound, generator=generator)


def reset_norm(norm: nn.LayerNorm, gain: float) -> None:
    norm.weight.fill_(gain)
    norm.bias.zero_()


def last_embedding(spans: Tensor, lengths: Tensor) -> Tensor:
    """Take the last embedding of spans [M, N, d] with lengths [M]: [M, d]."""
    return spans[torch.arange(len(spans), device=spans.device), lengths - 1]


def exponential_embedding(spans: Tensor, lengths: Tensor) -> Tensor:
    """Average the embeddings of spans [M, N, d] with lengths [M], weights 1, 2, 4, 8: [M, d]."""
    inside = inside_spans(lengths, spans.shape[1])
    weights = inside * torch.exp2(torch.arange(spans.shape[1], device=spans.device)).to(spans.dtype)
    weights = weights / weights.sum(dim=1, keepdim=True)
    return (weights[..., None] * spans.masked_fill(~inside[..., None], 0.0)).sum(dim=1)


ANCHORS: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "last": last_embedding,
    "exponential": exponential_embedding,
}


def with_rows_of(module: MergeModule, rules: RuleSet) -> MergeModule:
    """Return a module without the rule rows of spans that are no rules of a set."""
    rows = None if module.rows is None else module.rows.of_rules(rules)
    if rows is module.rows:
        return module
    copied = copy.deepcopy(module)
    copied.rows = rows
    return copied
