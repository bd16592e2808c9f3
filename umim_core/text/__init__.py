"""Corpora: documents from files and data sets, token ids, fixed-length segments."""
