"""Merge rules: filters, the rule set, its tables and its matcher."""
