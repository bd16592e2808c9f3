"""Alignment with raw predictions and damage of rules, against naive loops and forwards anew."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.engine_matrix import build, from_scratch, module_for
from support.merged_models import cuts_of, placed
from umim_core.config.form import UnitPositions
from umim_core.errors import EvaluationError, NumericalError
from umim_core.evaluation import alignment
from umim_core.evaluation.alignment import METRICS, evaluate_alignment, row_divergence, row_metrics
from umim_core.evaluation.rule_damage import measure_damage
from umim_core.evaluation.standard_errors import ratio_error
from umim_core.merging.merged_model import MergedModel
from umim_core.rules.damage_table import DamageTable
from umim_core.rules.matcher import Matcher
from umim_core.rules.ruleset import RuleSet

P = 0.9


def ranking(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    mass = math.fsum(weights)
    return [weight / mass for weight in weights]


def nucleus(logits: list[float]) -> set[int]:
    probs, chosen, mass = softmax(logits), set[int](), 0.0
    for token in ranking(logits):
        if mass >= P:
            break
        chosen.add(token)
        mass += probs[token]
    return chosen


def naive(teacher: list[list[float]], student: list[list[float]]) -> dict[str, float]:
    sums = dict.fromkeys(METRICS, 0.0)
    for t, s in zip(teacher, student, strict=True):
        order_t, order_s = ranking(t), ranking(s)
        p_t, p_s = softmax(t), softmax(s)
        sums["top1"] += order_t[0] == order_s[0]
        for k in (3, 10):
            size = min(k, len(t))
            sums[f"top{k}"] += len(set(order_t[:size]) & set(order_s[:size])) / size
        ours, theirs = nucleus(t), nucleus(s)
        sums["topp"] += len(ours & theirs) / min(len(ours), len(theirs))
        sums["mrr"] += 1 / (1 + order_s.index(order_t[0]))
        cross = -math.fsum(a * math.log(b) for a, b in zip(p_t, p_s, strict=True))
        sums["cross_entropy"] += cross
        sums["kl"] += cross + math.fsum(a * math.log(a) for a in p_t)
    return {name: total / len(teacher) for name, total in sums.items()}


def measure(teacher: Tensor, student: Tensor) -> dict[str, float]:
    return {name: float(values.mean()) for name, values in row_metrics(teacher, student).items()}


def logits(seed: int, rows: int = 12, vocab: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_vocabulary_beyond_what_is_sorted_equals_a_naive_loop(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steep rows end their nucleus among the sorted logits, flat ones do not; many logits tie."""
    vocab = 3000
    monkeypatch.setattr(alignment, "_BLOCK_BYTES", 3 * 8 * vocab)  # blocks of 3 and 2 rows
    slope = torch.tensor([0.05, 3.0, 0.3, 1.0, 0.1], dtype=torch.float64)[:, None]
    teacher, noise = (slope * logits(seed, rows=5, vocab=vocab) for seed in (6, 7))
    steps = [(part * 32).round().div(32).to(dtype) for part in (teacher, teacher + 0.5 * noise)]
    sizes = [len(nucleus(row)) for row in steps[0].tolist()]
    assert min(sizes) < 200 < alignment._LARGEST < max(sizes)
    found = row_metrics(*steps)
    expected = [naive([t], [s]) for t, s in zip(*(part.tolist() for part in steps), strict=True)]
    for name in ("top1", "top3", "top10", "topp", "mrr"):
        assert found[name].tolist() == [row[name] for row in expected], name
    for name in ("kl", "cross_entropy"):
        assert found[name].tolist() == pytest.approx([row[name] for row in expected], rel=1e-12)
    assert torch.equal(row_divergence(*steps), found["kl"])


def test_a_divergence_far_below_the_entropy_keeps_its_digits() -> None:
    """A constant step d of half the logits: KL = ln(1 + q (e^d - 1)) - q d, q the mass it is on."""
    teacher, step = logits(8, rows=3), 1e-4
    moved = torch.arange(40) < 20
    mass = teacher.softmax(-1)[:, moved].sum(-1).tolist()
    wanted = [math.log1p(q * math.expm1(step)) - q * step for q in mass]
    assert max(wanted) < 2e-9
    found = row_divergence(teacher, teacher + step * moved)
    assert found.tolist() == pytest.approx(wanted, rel=1e-5)


# Logits in steps of 0.75 tie often, and no partial sum of such a softmax lands on 0.9 exactly.
TIED = st.lists(
    st.lists(st.integers(-2, 2).map(lambda step: 0.75 * step), min_size=5, max_size=5),
    min_size=2,
    max_size=2,
)


@given(TIED)
def test_ties_are_broken_by_id_in_teacher_and_student(rows: list[list[float]]) -> None:
    teacher, student = [rows[0]], [rows[1]]
    found = measure(torch.tensor(teacher), torch.tensor(student))
    assert found == pytest.approx(naive(teacher, student), abs=1e-6)


VOCAB = 12
NESTED = [
    (1, 2), (1, 2, 3, 4), (5, 6, 7), (5, 6), (8, 9, 10), (9, 10), (2, 2), (1, 2, 3, 4, 5, 6)
]  # fmt: skip
FLAT = [(1, 2, 3, 4), (5, 6, 7), (8, 9), (3, 1, 3, 1, 3, 1)]


def model_of(spans: list[tuple[int, ...]], family: str = "llama") -> MergedModel:
    """A random model; a head of ``phi`` adds a bias, here one that is not zero."""
    backbone = build(family, vocab_size=VOCAB, max_position_embeddings=64)
    if backbone.head_bias is not None:
        with torch.no_grad():
            backbone.head_bias.copy_(torch.linspace(-2.0, 2.0, VOCAB))
    assert (backbone.head_bias is not None) == (family == "phi")
    return MergedModel(backbone, module_for(backbone, 6), Matcher(RuleSet.from_spans(spans)))


def rows_of(spans: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Rows full of spans, of different lengths; the last has none."""
    rng = np.random.default_rng(0)
    parts = [np.array(span) for span in (*spans, (0,), (11,), (3, 1))]
    rows = [np.concatenate([parts[i] for i in rng.integers(0, len(parts), 9)]) for _ in range(3)]
    return [*rows, np.array([1, 2, 3, 4]), np.array([0, 11, 0])]


def joined(values: list[dict[str, Tensor]]) -> dict[str, float]:
    return {name: float(torch.cat([v[name] for v in values]).mean()) for name in METRICS}


def states_of(
    merged_model: MergedModel, row: np.ndarray
) -> Iterator[tuple[np.ndarray, list[tuple[int, int]], dict[str, Tensor]]]:
    """Tokens, units and metrics of each state of a row from the first merge on, a forward each."""
    backbone, matcher = merged_model.backbone, merged_model.require_matcher()
    for size in range(1, len(row) + 1):
        prefix, units = row[:size], cuts_of(matcher, row[:size])
        if max(length for _, length in units) > 1:
            prompt = [(matcher, [prefix.tolist()])]
            positions = merged_model.unit_positions
            ((student, _),) = from_scratch(backbone, merged_model.module, prompt, positions)
            teacher = backbone.model(torch.tensor(prefix)[None]).logits[0, -1]
            yield prefix, units, row_metrics(teacher[None], student[None])


@pytest.mark.parametrize(
    ("family", "spans", "unit_positions"),
    [*product(["llama"], [NESTED, FLAT], ["compact", "preserved"]), ("phi", FLAT, "compact")],
)
@torch.no_grad()
def test_both_sets_of_rows_equal_forwards_from_scratch(
    family: str,
    spans: list[tuple[int, ...]],
    unit_positions: UnitPositions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(alignment._HEAD_ROWS, "cpu", 7)  # several chunks of logits a batch
    merged_model, rows = placed(model_of(spans, family), unit_positions), rows_of(spans)
    states, by_row = [], []
    for row in rows:
        ends = {start + n for start, n in cuts_of(merged_model.require_matcher(), row)}
        found_of_row = [(len(prefix), values) for prefix, _, values in states_of(merged_model, row)]
        states += [values for _, values in found_of_row]
        by_row.append([values for size, values in found_of_row if size in ends])
    aligned = list(chain.from_iterable(by_row))
    found = evaluate_alignment(rows, merged_model, batch_size=2)
    assert (found.aligned_rows, found.state_rows) == (len(aligned), len(states))
    assert len(aligned) < len(states)
    assert found.means == pytest.approx(joined(aligned), abs=1e-9)
    assert found.state_means == pytest.approx(joined(states), abs=1e-9)
    assert found.means["kl"] != pytest.approx(found.state_means["kl"], abs=1e-4)
    assert found.metrics()["kl_states"] == found.state_means["kl"]
    for name in METRICS:
        sums = [sum(float(value[name]) for value in row) for row in by_row]
        assert found.errors[name] == pytest.approx(ratio_error(sums, list(map(len, by_row))))


Damage = dict[tuple[int, ...], list[float]]  # rule -> occurrences, merges, KL


def by_rule(table: DamageTable) -> Damage:
    spans = [tuple(ids) for n in table.rules.orders for ids in table.rules.ids_by_order[n].tolist()]
    values = zip(table.occurrences, table.merges, table.kl, strict=True)
    return {span: list(map(float, found)) for span, found in zip(spans, values, strict=True)}


def by_hand(merged_model: MergedModel, rows: list[np.ndarray], window: int) -> Damage:
    """The rule of the module's docstring, one forward a state."""
    matcher = merged_model.require_matcher()
    orders = matcher.rules.ids_by_order.values()
    found: Damage = {tuple(ids): [0.0, 0.0, 0.0] for rules in orders for ids in rules.tolist()}
    for row in rows:
        whole = cuts_of(matcher, row)
        for prefix, units, values in states_of(merged_model, row):
            start, length = units[-1]
            if length > 1:
                rule = tuple(prefix[start:].tolist())
                found[rule][0] += 1
                found[rule][1] += (start, length) in whole
            if merged := [unit for unit in units[-window:] if unit[1] > 1]:
                start, length = merged[-1]
                rule = tuple(prefix[start : start + length].tolist())
                found[rule][2] += float(values["kl"])
    return found


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("spans", [NESTED, FLAT])
@torch.no_grad()
def test_every_state_goes_to_its_last_merge_within_the_window(
    spans: list[tuple[int, ...]], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(alignment._HEAD_ROWS, "cpu", 7)  # several chunks of logits a batch
    merged_model, rows = model_of(spans), rows_of(spans)
    found = by_rule(measure_damage(rows, merged_model, window=window, batch_size=2))
    wanted = by_hand(merged_model, rows, window)
    assert found.keys() == wanted.keys()
    for rule, values in wanted.items():
        assert found[rule] == pytest.approx(values, abs=1e-9), rule
    hidden = sum(occurrences - merges for occurrences, merges, _ in found.values())
    assert (hidden > 0) is (spans is NESTED)


def test_what_cannot_be_measured_is_refused() -> None:
    merged_model = model_of(FLAT)
    for rows in ([], [np.array([0, 11, 0])]):
        for measure in (measure_damage, evaluate_alignment):
            with pytest.raises(EvaluationError, match=f"some rule must match .* {len(rows)} rows"):
                measure(rows, merged_model)
    for measure in (measure_damage, evaluate_alignment):
        with pytest.raises(EvaluationError, match=f"between 0 and {VOCAB - 1}; got row 1: {VOCAB}"):
            measure([np.array([1, 2, 3, 4]), np.array([5, VOCAB])], merged_model)
    merged_model.require_module().norm_o.weight.fill_(math.nan)
    with pytest.raises(NumericalError, match="every divergence must be finite"):
        measure_damage(rows_of(FLAT), merged_model)
    with pytest.raises(NumericalError, match="alignment metric must be finite"):
        evaluate_alignment(rows_of(FLAT), merged_model)
