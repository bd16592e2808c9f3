"""Tracking: records of runs, written to MLflow."""
