"""Bugs of the method: numbers that are wrong and look right."""

from __future__ import annotations

from .bug import SeededBug

METHOD = (
    SeededBug(
        "a rollback takes back two units at most",
        "method",
        "umim_core/backbone/row_cache.py",
        "self.lengths = self.lengths - counts.to(torch.int64)",
        "self.lengths = self.lengths - counts.to(torch.int64).clamp(max=2)",
        ("tests/inference/test_engine.py",),
    ),
    SeededBug(
        "a rollback takes back one unit too few",
        "method",
        "umim_core/rules/trie.py",
        "for place in range(length - 1):",
        "for place in range(length - 2):",
        ("tests/rules/test_incremental_matcher.py",),
    ),
    SeededBug(
        "the teacher's mask is shifted by one token",
        "method",
        "umim_core/training/loss.py",
        "return AlignedRows(batch, last, unit)",
        "return AlignedRows(batch, (last - 1).clamp(min=0), unit)",
        ("tests/training/test_alignment_masks.py",),
    ),
    SeededBug(
        "a branch has the position of its span",
        "method",
        "umim_core/merging/decode_states.py",
        "compact = unit + within.units[span, offset]",
        "compact = unit",
        ("tests/merging/test_decode_states.py", "tests/merging/test_likelihood.py"),
    ),
    SeededBug(
        "ties in the overlap filter go to larger ids",
        "method",
        "umim_core/rules/filters.py",
        """\
    ranked = np.sort((falling << bits) | np.arange(support.size, dtype=np.int64))
    return ranked & ((1 << bits) - 1)""",
        "    return np.lexsort((-np.arange(support.size), falling))",
        ("tests/rules/test_filters.py",),
    ),
    SeededBug(
        "containment keeps where it should drop",
        "method",
        "umim_core/rules/filters.py",
        'if containment == "drop" and len(passed)',
        'if containment == "keep" and len(passed)',
        ("tests/rules/test_filters.py",),
    ),
    SeededBug(
        "special tokens may be in rules",
        "method",
        "umim_core/rules/protect.py",
        "special = special_ids(tokenizer)",
        "special = frozenset[int]()",
        ("tests/rules/test_protect.py",),
    ),
    SeededBug(
        "n-grams cross the borders of segments",
        "method",
        "umim_core/mining/counting.py",
        "int(borders[-1])), borders - borders[0]",
        "int(borders[-1])), borders[[0, -1]] - borders[0]",
        ("tests/mining/test_counting.py",),
    ),
    SeededBug(
        "the shortest rule matches first",
        "method",
        "umim_core/rules/trie.py",
        "            best = length\n",
        "            best = length\n            break\n",
        ("tests/rules/test_matcher.py",),
    ),
    SeededBug(
        "surrogates begin at the scale 1",
        "method",
        "umim_core/merging/forms/attention_form.py",
        'reset_norm(self.norm_o, embedding_std if self.residual == "none" else 0.0)',
        'reset_norm(self.norm_o, 1.0 if self.residual == "none" else 0.0)',
        ("tests/merging/forms/test_attention.py", "tests/merging/test_module.py"),
    ),
    SeededBug(
        "padding takes part in a surrogate",
        "method",
        "umim_core/merging/forms/attention_form.py",
        "weights = scores.masked_fill(~inside[:, None], -torch.inf).softmax(dim=-1)",
        "weights = scores.softmax(dim=-1)",
        ("tests/merging/test_module.py", "tests/merging/forms/test_attention.py"),
    ),
    SeededBug(
        "the token that ends a row is merged",
        "method",
        "umim_core/rules/trie.py",
        "        if not running[row]:\n            continue\n",
        "",
        ("tests/rules/test_incremental_matcher.py", "tests/inference/test_engine.py"),
    ),
    SeededBug(
        "rules reach from the prompt into generated tokens",
        "method",
        "umim_core/inference/engine.py",
        "        if request.match_border:\n",
        '        if request.merge == "all":\n',
        ("tests/inference/test_engine.py",),
    ),
    SeededBug(
        "KL does not subtract the teacher's entropy",
        "method",
        "umim_core/training/loss.py",
        "kl = teacher.sub_(student).mul_(p_t).sum(dim=-1)",
        "kl = -student.mul(p_t).sum(dim=-1)",
        ("tests/training/test_loss_reference.py",),
    ),
)
