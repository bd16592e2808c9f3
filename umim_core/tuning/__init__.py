"""Tuning a merge checkpoint to the requests that somebody logs."""
