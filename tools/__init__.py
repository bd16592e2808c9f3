"""Tools of maintainers: a trained checkpoint is taken into the package."""
