"""Prefect flows of the UMIM pipeline."""
