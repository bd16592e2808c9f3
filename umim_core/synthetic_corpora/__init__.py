"""Corpora that a language model writes: questions, and the trajectories sampled for them."""
