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

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from umim_core.backbone.attention_masks import check_attention_window
from umim_core.inference.batch import Batch, exhaust
from umim_core.inference.options import GenerateOptions
from umim_core.inference.outputs import Generation, GenerationState, Prefix, Row, merged_spans
from umim_core.inference.prompts import (
    Prompts,
    TokenPrompt,
    check_room,
    positions_taken,
    read_prompts,
)
from umim_core.inference.unit_cache import UnitCache, UnitInputs
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.matcher import Advance, Matcher
from umim_core.rules.pruning import rules_under
from umim_core.text.token_ids import Ints


class Engine:
    """Reads prompts and generated units by a merged model; the module's weights are fixed.

    ``batch.Reader`` says what ``matcher``, ``begin``, ``feed`` and ``gathered`` do.
    """

    def __init__(self, merged_model: MergedModel) -> None:
        self.merged_model, self.backbone = merged_model, merged_model.backbone
        self._inputs = UnitInputs(merged_model)
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
        """Generate a continuation of every prompt: all of its ``steps``."""
        return exhaust(self.steps(prompts, options, past))

    def steps(
        self,
        prompts: Sequence[TokenPrompt],
        options: GenerateOptions,
        past: GenerationState | None = None,
    ) -> Generator[list[Row], None, Generation]:
        """Generate token by token.

        Args:
            prompts: Raw ids per row [T_b], of any lengths, at least one token each, with the parts
                that may merge where that is not all (``PromptIds``). With ``past`` only what is
                added to it.
            options: Settings are taken as they are given; none comes from the model.
            past: The state of an earlier output, or a prefix of all prompts; it is not read again.

        Yields:
            The rows after every token.
        """
        state = None if past is None else past.for_turn(len(prompts), self.merged_model)
        rows, columns, timings = yield from Batch(self).run(prompts, options, state)
        after = GenerationState(tuple(tuple(row.raw) for row in rows), columns, self.merged_model)
        if options.span_eviction is not None:
            after.release()  # its positions are not known without the columns that went
        return Generation(tuple(rows), timings, after, options)

    @torch.no_grad()
    def prefix(self, prompt: TokenPrompt, options: GenerateOptions) -> Prefix:
        """Read a text like a prompt of ``steps``, into a cache that many requests continue."""
        read = read_prompts([prompt], None, options.reading(self.merged_model))
        cache = self._cache_for(read, options, 1, None, several=False)
        self._prefill(read, cache, [0])
        ids, spans = (tuple(read.ids[0].tolist()),), merged_spans(read.cuts[0])
        return Prefix(ids, cache, self.merged_model, True, spans=spans)

    def begin(
        self,
        prompts: Prompts,
        options: GenerateOptions,
        new: int,
        past: GenerationState | None,
        several: bool,
    ) -> tuple[UnitCache, Tensor]:
        cache = self._cache_for(prompts, options, new, past, several)
        before = [0] * len(prompts.ids) if past is None else [len(ids) for ids in past.fed_ids]
        logits = self._prefill(prompts, cache, before)
        return cache.repeated(options.samples), logits.repeat_interleave(options.samples, 0)

    def _cache_for(
        self,
        prompts: Prompts,
        options: GenerateOptions,
        new: int,
        past: GenerationState | None,
        several: bool,
    ) -> UnitCache:
        """Return a cache with room for so many new tokens: new, or a copy of ``past``'s."""
        units = prompts.packed.unit_counts.cpu()
        raw = prompts.packed.raw_counts.cpu()
        if past is not None and past.cache is not None:
            units = units + past.cache.lengths
            raw = raw + torch.tensor([len(ids) for ids in past.fed_ids])
        limit = positions_taken(int(units.max()), new)
        most_raw = positions_taken(int(raw.max()), new)
        preserved = self.merged_model.unit_positions == "preserved"
        highest = most_raw if preserved else limit
        check_room(self.backbone, highest, new)
        evicts = options.span_eviction is not None
        if several or preserved or evicts:  # one row keeps the backbone's windows
            check_attention_window(self.backbone.model.config, max(limit, highest))
        if past is None or past.cache is None:
            return UnitCache.empty(self.merged_model, len(units), limit, most_raw)
        cache = past.cache
        if past.shared:
            several_rows = len(cache.lengths) > 1
            rows = range(len(units))
            cache = UnitCache.of_rows([(cache, row if several_rows else 0) for row in rows])
        # Short prompts are padded to the widest, wherever their rows begin.
        padded = int(cache.lengths.max()) + prompts.packed.token_ids.shape[1]
        wide = max(len(ids) for ids in past.raw_ids) + max(map(len, prompts.ids))
        cache.allow(max(limit, padded), max(most_raw, wide))
        return cache

    def _prefill(self, prompts: Prompts, unit_cache: UnitCache, past: Sequence[int]) -> Tensor:
        """Fill the cache with the prompts' units; return the logits after each row's last [B, V].

        ``past`` are the raw tokens that each row holds already.
        """
        packed, cache = prompts.packed, unit_cache.units
        states = self._inputs.of_prompts(prompts, unit_cache, past)
        cache.begin(packed.token_ids.shape[1])
        if self.merged_model.unit_positions == "preserved":
            before = torch.tensor(past, device=self.backbone.device)[:, None]
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
        states = self._inputs.of_step(step, tokens, columns, positions)
        cache.begin(1)
        with trunk.adapting(torch.from_numpy(step.lengths > 1)):
            hidden = trunk.upper.on_cache(states, cache, positions)
        cache.commit(torch.from_numpy(step.lengths > 0))
        return self.backbone.head(hidden)[:, 0]

    def gathered(self, places: Sequence[tuple[UnitCache, int]]) -> UnitCache:
        return UnitCache.of_rows(places)
