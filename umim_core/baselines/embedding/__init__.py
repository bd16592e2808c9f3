"""Baselines of merged spans: other embeddings at the rules of UMIM, other spans."""
