"""Task files for lm-eval."""
