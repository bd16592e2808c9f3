"""Stages of the pipeline, one file each."""
