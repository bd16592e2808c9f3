"""Baselines: token reducers, span mergers and cache policies, one file per method."""
