"""The forwards of a batch, over a cache that shrinks whenever generated tokens complete a rule.

One forward per token, always, with one new unit per row::

    begin   prompt ids --match--> units --prefill--> cache, logits
    feed    does a rule end at y, the token chosen last, among the generated tokens?
                no   feed e(y)                    cache length + 1
                yes  roll back its earlier units,
                     feed the surrogate           cache length - rolled back + 1

Prompts merge by all rules, y by those within the bound on prices. With ``span_eviction`` nothing is
merged, and the columns of old spans go (``row_eviction``).

The last token of a row is never fed: nothing follows it, unless another turn continues the state.
Samples of one prompt share its prefill.

At a merge depth k above 0 a token passes the first k layers as it is. Then its unit is made of its
state and those of the span's earlier tokens, three of which are kept per row (``unit_cache``); only
the other layers are rolled back. It stays one forward per token.

Positions are contiguous over units (``compact``, the paper's) or those of the units' last raw
tokens (``preserved``), as the module was trained.

Shapes: B rows, S prompt units of the longest row, W units per forward, d embedding size, V
vocabulary.
Source: paper, "Inference with UMIM".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from umim_core.inference.batch import (
    Batch,
    Prompts,
    TokenPrompt,
    check_room,
    exhaust,
    positions_taken,
    read_prompts,
)
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Generation, GenerationState, Prefix, merged_spans
from umim_core.inference.unit_cache import UnitCache
from umim_core.merging.merged_model import MergedModel, SpanCache
from umim_core.rules.matcher import Advance, Matcher
from umim_core.rules.pruning import rules_under
from umim_core.text.token_ids import Ints


class Engine:
    """Reads prompts and generated units by a merged model; the module's weights are fixed.

    ``batch.Reader`` says what ``matcher``, ``begin``, ``feed`` and ``gathered`` do.
    """

    def __init__(self, merged_model: MergedModel) -> None:
        self.merged_model, self.backbone = merged_model, merged_model.backbone
        by_ids = merged_model.module is not None and not merged_model.merge_depth
        self._spans = SpanCache(merged_model) if by_ids else None
        self._latest: tuple[float, Matcher] | None = None

    def matcher(self, options: GenerateOptions) -> Matcher | None:
        if not options.merges_generated(self.merged_model):
            return None
        matcher = self.merged_model.require_matcher()
        bound = options.decode_bound(self.merged_model)
        if bound is None:
            return matcher
        latest = self._latest  # the newest one is kept; another thread may replace it
        if latest is None or latest[0] != bound:
            self._latest = latest = bound, Matcher(rules_under(matcher.rules, bound))
        return latest[1]

    def generate(
        self,
        prompts: Sequence[TokenPrompt],
        options: GenerateOptions,
        past: GenerationState | None = None,
    ) -> Generation:
        """Generate until all rows have ended; ``Batch.run`` gives their tokens as they come."""
        return exhaust(Batch(self).run(prompts, options, past))

    @torch.no_grad()
    def prefix(self, prompt: TokenPrompt, options: GenerateOptions) -> Prefix:
        """Read a text like a prompt of ``generate``, into a cache that many requests continue."""
        read = read_prompts([prompt], None, options.reading(self.merged_model))
        cache, _ = self.begin(read, options, None, several=False)
        ids, spans = (tuple(read.ids[0].tolist()),), merged_spans(read.cuts[0])
        return Prefix(ids, cache, self.merged_model, True, spans=spans)

    def begin(
        self,
        prompts: Prompts,
        options: GenerateOptions,
        past: GenerationState | None,
        several: bool,
    ) -> tuple[UnitCache, Tensor]:
        new = options.settings.max_new_tokens or 1
        held = [0] * len(prompts.ids) if past is None else [len(ids) for ids in past.fed_ids]
        units, raw = prompts.packed.unit_counts.cpu(), prompts.packed.raw_counts.cpu()
        earlier = None if past is None else past.cache
        if earlier is not None:
            units = units + earlier.lengths
        limit = positions_taken(int(units.max()), new)
        most_raw = positions_taken(int((raw + torch.tensor(held)).max()), new)
        preserved = self.merged_model.unit_positions == "preserved"
        highest = most_raw if preserved else limit
        check_room(self.backbone, highest, new)
        evicts = options.span_eviction is not None
        if several or preserved or evicts:  # one row keeps the backbone's windows
            self.backbone.check_window(max(limit, highest))
        if past is None or earlier is None:
            cache = UnitCache.empty(self.merged_model, len(units), limit, most_raw)
        else:
            cache = earlier
            if past.shared:
                one = len(earlier.lengths) == 1
                cache = UnitCache.of_rows([(earlier, 0 if one else b) for b in range(len(units))])
            # Short prompts are padded to the widest, wherever their rows begin.
            padded = int(cache.lengths.max()) + prompts.packed.token_ids.shape[1]
            wide = max(len(ids) for ids in past.raw_ids) + max(map(len, prompts.ids))
            cache.allow(max(limit, padded), max(most_raw, wide))
        logits = self._prefill(prompts, cache, held)
        return cache.repeated(options.samples), logits.repeat_interleave(options.samples, 0)

    def _prefill(self, prompts: Prompts, unit_cache: UnitCache, held: Sequence[int]) -> Tensor:
        """Fill the cache with the prompts' units; return the logits after each row's last [B, V].

        ``held`` are the raw tokens that each row holds already.
        """
        packed, cache = prompts.packed, unit_cache.units
        states = self._prompt_states(prompts, unit_cache, held)
        cache.begin(packed.token_ids.shape[1])
        if self.merged_model.unit_positions == "preserved":
            before = torch.tensor(held, device=self.backbone.device)[:, None]
            positions = packed.position_ids("preserved") + before
        else:  # padding takes its row's last position: its column may lie beyond the backbone's
            last_unit = cache.plan.columns[:, :1] + packed.unit_counts[:, None] - 1
            positions = cache.plan.columns.minimum(last_unit)
        trunk = self.merged_model.trunk
        with trunk.adapting(packed.merged):
            hidden = trunk.upper.on_cache(states, cache, positions)
        cache.commit(packed.unit_counts.cpu())
        last = packed.unit_counts - 1
        if hidden.dtype.itemsize > 2 and bool((last == hidden.shape[1] - 1).all()):
            # A slice, as in transformers: other strides take another GEMM kernel and change the
            # last bit of the logits (seen on CPU, float32).
            return self.backbone.head(hidden[:, -1:])[:, 0]
        # A matrix [B, d]: of a slice in half precision, torch multiplies each row with a copy of
        # the head of its own; 184 ms on one core against 5, with a head of 49,152 x 576.
        return self.backbone.head(hidden[torch.arange(len(last), device=hidden.device), last])

    def feed(
        self, step: Advance, tokens: Ints, columns: UnitCache, positions: Tensor | None
    ) -> Tensor:
        cache, trunk = columns.units, self.merged_model.trunk
        if step.rollback.any():
            cache.rollback(torch.from_numpy(step.rollback))
        states = self._step_states(step, tokens, columns, positions)
        cache.begin(1)
        with trunk.adapting(torch.from_numpy(step.lengths > 1)):
            hidden = trunk.upper.on_cache(states, cache, positions)
        cache.commit(torch.from_numpy(step.lengths > 0))
        return self.backbone.head(hidden)[:, 0]

    def _prompt_states(self, prompts: Prompts, cache: UnitCache, held: Sequence[int]) -> Tensor:
        """Return the states of the prompts' units before the merge depth [B, S, d]."""
        lower, packed = self.merged_model.trunk.lower, prompts.packed
        if lower is None or cache.raw is None:
            with torch.autocast(self.backbone.device.type, enabled=False):  # as those kept
                return self.merged_model.embed(packed)
        device, counts = self.backbone.device, packed.raw_counts
        width = int(counts.max())
        ids = torch.zeros(len(prompts.ids), width, dtype=torch.int64)
        for b, row in enumerate(prompts.ids):
            ids[b, : len(row)] = torch.from_numpy(row)
        ids = ids.to(device)
        before = torch.tensor(held, device=device)[:, None]
        columns = torch.arange(width, device=device)
        positions = before + torch.minimum(columns.expand_as(ids), counts[:, None] - 1)
        cache.raw.begin(width)
        states = lower.on_cache(self.backbone.embed(ids), cache.raw, positions)
        cache.raw.commit(counts.cpu())
        cache.remember(states, counts)
        return self.merged_model.states_of(ids, states, packed.ends, packed.lengths)

    def _step_states(
        self, step: Advance, tokens: Ints, cache: UnitCache, positions: Tensor | None
    ) -> Tensor:
        """Return the state of each row's newest unit before the merge depth [B, 1, d]."""
        lower, device = self.merged_model.trunk.lower, self.backbone.device
        merged = np.flatnonzero(step.lengths > 1)
        rows = torch.from_numpy(merged).to(device)
        if lower is None or cache.raw is None:  # an ended row is fed id 0
            embeddings = self.backbone.embed(torch.from_numpy(step.spans[:, :1]).to(device))
            if merged.size and self._spans is not None:
                pairs = zip(step.spans[merged].tolist(), step.lengths[merged].tolist(), strict=True)
                embeddings[rows, 0] = self._spans.find([tuple(ids[:n]) for ids, n in pairs])
            return embeddings
        running, raw = torch.from_numpy(step.lengths > 0), cache.raw
        assert cache.recent is not None  # noqa: S101  prefilled
        fed = torch.from_numpy(np.where(step.lengths > 0, tokens, 0)).to(device)
        raw.begin(1)
        states = lower.on_cache(self.backbone.embed(fed[:, None]), raw, positions)
        raw.commit(running)
        window = torch.cat([cache.recent, states], dim=1)  # [B, reach + 1, d], the newest last
        cache.remember(states, running.to(device, torch.int64))
        if merged.size:
            states[rows, 0] = self.merged_model.newest_states(
                window[rows], torch.from_numpy(step.spans[merged]).to(device), step.lengths[merged]
            )
        return states

    def gathered(self, places: Sequence[tuple[UnitCache, int]]) -> UnitCache:
        return UnitCache.of_rows(places)
