"""Bugs of stages, resuming, locks, ranks and tracking: what shows after a crash, or never."""

from __future__ import annotations

from .bug import SeededBug

RESUME = (
    SeededBug(
        "every rank resumes the state that it sees",
        "resume",
        "umim_core/training/train_loop.py",
        """\
    if rank == 0 and (newest := newest_state(state_dir, world)) is not None:
        step = step_of(newest)
    step = from_first_rank(step)
""",
        """\
    if (newest := newest_state(state_dir, world)) is not None:
        step = step_of(newest)
    from_first_rank(step)
""",
        (),
        ("tests/tasks/training/test_train_agreement.py",),
    ),
    SeededBug(
        "a lock on a file that was removed counts",
        "resume",
        "umim_core/store/locking.py",
        "if os.fstat(handle).st_ino != path.stat().st_ino:",
        "if os.fstat(handle).st_ino < 0:",
        ("tests/store/test_locking.py",),
    ),
    SeededBug(
        "a directory gets its name before it is flushed",
        "resume",
        "umim_core/store/publication.py",
        "                flush_tree(partial)\n                partial.rename(final)\n",
        "                partial.rename(final)\n                flush_tree(final)\n",
        ("tests/store/test_disk.py", "tests/store/test_artifacts.py"),
    ),
    SeededBug(
        "excluded tokens are not in the key of counts",
        "resume",
        "tasks/stages/mine.py",
        '            "excluded": list(excluded),\n            "count_documents": options.',
        '            "count_documents": options.',
        ("tests/tasks/stages/test_stage_keys.py",),
    ),
    SeededBug(
        "the backbone's weights are not in the key of a distillation",
        "resume",
        "tasks/stages/train.py",
        '            "backbone": backbone_identity(cell.backbone, cell.revision),\n',
        "",
        ("tests/tasks/stages/test_stage_keys.py",),
    ),
    SeededBug(
        "metrics that are 0 are dropped",
        "resume",
        "tasks/tracking/mlflow_store.py",
        "if math.isfinite(point[2])",
        "if point[2] and math.isfinite(point[2])",
        ("tests/tasks/tracking/test_tracking.py",),
    ),
    SeededBug(
        "a resumed run draws other random numbers",
        "resume",
        "umim_core/training/train_state.py",
        'torch.set_rng_state(tensors.pop("rng.torch"))',
        'tensors.pop("rng.torch")',
        ("tests/tasks/training/test_train_state.py",),
    ),
    SeededBug(
        "a resumed run forgets the moments of AdamW",
        "resume",
        "umim_core/training/train_loop.py",
        'if name.startswith("optimizer.")})',
        'if name.startswith("moments.")})',
        ("tests/tasks/training/test_train_state.py",),
    ),
    SeededBug(
        "the lock of a dead process is never recovered",
        "resume",
        "umim_core/store/locking.py",
        "    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)\n",
        "    if path.exists():\n        return None\n"
        "    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)\n",
        ("tests/store/test_locking.py",),
    ),
    SeededBug(
        "an altered file is not noticed",
        "resume",
        "umim_core/store/artifacts.py",
        'if sums[name] != entry.get("sha256"):',
        "if not sums[name]:",
        ("tests/store/test_artifacts.py",),
    ),
    SeededBug(
        "each rank divides by its own rows",
        "resume",
        "umim_core/training/train_loop.py",
        "weight, num_bad, loss_sum, kl_sum = sum_over_ranks(shares)\n",
        "_, num_bad, loss_sum, kl_sum = sum_over_ranks(shares)\n    weight = loss.weight * world\n",
        ("tests/tasks/training/test_train_merges.py",),
        ("tests/tasks/training/test_strategies.py",),
    ),
)
