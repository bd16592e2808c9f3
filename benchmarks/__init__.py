"""Benchmarks: scripts that print a table and, last, one JSON line. None of them is a timed test."""
