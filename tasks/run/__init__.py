"""Runs: the stage contract and the pipeline around it."""
