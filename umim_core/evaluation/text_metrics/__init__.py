"""Metrics of generated texts: one file per kind."""
