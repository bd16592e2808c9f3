"""Tokenising and counting on Ray Data."""
