"""Merge checkpoints: module, rules and the backbone they belong to, on disk."""
