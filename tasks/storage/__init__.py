"""Artifacts in object storage, for runs and for nodes of a cluster without a shared disk."""
