"""Evaluation tasks: one file per task."""
