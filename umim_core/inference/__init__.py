"""Inference: the engine that merges while it decodes and rolls the KV cache back."""
