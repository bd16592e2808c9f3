"""Evaluation: perplexity, and the lm-eval model and task."""
