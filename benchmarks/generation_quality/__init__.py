"""Texts of the base model against texts of UMIM: ``python -m benchmarks.generation_quality``."""
