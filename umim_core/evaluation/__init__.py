"""Evaluation: alignment, perplexity, generated text, and the lm-eval model and tasks."""
