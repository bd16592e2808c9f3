"""Merge rules: n-gram counting, filters, the rule set and its matcher."""
