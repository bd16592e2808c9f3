"""Tracking: records of runs, spooled on disk and written to MLflow."""
