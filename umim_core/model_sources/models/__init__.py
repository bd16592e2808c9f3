"""Packaged models: one file per model."""
