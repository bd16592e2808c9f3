"""Execution of model-written programs."""
