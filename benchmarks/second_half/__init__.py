"""Baselines at matched token reduction, on raw second halves: ``-m benchmarks.second_half``."""
