"""Stock tasks of lm-evaluation-harness, base against UMIM: ``python -m benchmarks.stock_tasks``."""
