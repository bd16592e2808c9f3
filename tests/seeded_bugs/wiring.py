"""Bugs of wiring: every part is right, and one is given what another should get."""

from __future__ import annotations

from .bug import SeededBug

WIRING = (
    SeededBug(
        "every setting is measured with the checkpoint of WT",
        "wiring",
        "flows/parts.py",
        'checkpoint = result.settings[setting].path / "checkpoint"',
        'checkpoint = result.settings["WT"].path / "checkpoint"',
        ("tests/flows/test_recipe_keys.py",),
    ),
    SeededBug(
        "DPO does not start from SFT",
        "wiring",
        "umim_core/adaptation/settings.py",
        'Setting(ADAPTED, "WT + FT", "task", "dpo")',
        'Setting(ADAPTED, "WT + Rules", "task", "dpo")',
        ("tests/flows/test_recipe_keys.py",),
    ),
    SeededBug(
        "perplexity out of domain is measured in domain",
        "wiring",
        "tasks/stages/evaluate.py",
        "part = rows_of(tokenized, split, segment_length, config.perplexity_rows, config.segments)",
        'part = rows_of(tokenized, "test", segment_length, config.perplexity_rows)',
        ("tests/tasks/data/test_splits.py",),
    ),
    SeededBug(
        "validation rows are training rows",
        "wiring",
        "tasks/stages/train.py",
        "TokenRows.of_segments(tokens(tokenized, split), recipe.segment_length)",
        'TokenRows.of_segments(tokens(tokenized, "train"), recipe.segment_length)',
        ("tests/tasks/data/test_splits.py",),
    ),
    SeededBug(
        "shards of a generated corpus share their seeds",
        "wiring",
        "tasks/stages/generate.py",
        "corpus.seed, first=first)",
        "corpus.seed)",
        ("tests/tasks/stages/test_generate.py",),
    ),
    SeededBug(
        "what cannot pass is tried again, and what can is not",
        "wiring",
        "tasks/run/pipeline.py",
        "return isinstance(error, ClusterError | TrackingError) or not",
        "return not isinstance(error, ClusterError | TrackingError) and",
        ("tests/tasks/run/test_retries.py",),
    ),
    SeededBug(
        "the shortest prompt's speed-up is shown as the longest's",
        "wiring",
        "tasks/stages/evaluate.py",
        "config.batch_sizes[0], max(config.prompt_lengths)",
        "config.batch_sizes[0], min(config.prompt_lengths)",
        ("tests/tasks/stages/test_benchmark.py",),
    ),
)
