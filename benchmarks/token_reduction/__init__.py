"""Quality against token reduction: ``python -m benchmarks.token_reduction``."""
