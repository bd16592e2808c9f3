"""Storage: artifacts with digests, atomic files, arrays without pickle, locks."""
