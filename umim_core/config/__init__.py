"""Configuration: the sections of a recipe, and the form of a merge module."""
