"""Trained controls of task adaptation, one file each."""
