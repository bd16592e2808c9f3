"""Ladder from the paper's form to all steps together: ``python -m benchmarks.ladder``."""
