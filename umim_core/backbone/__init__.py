"""Backbones: frozen language models, their tokenizers, identity, devices, masks and KV buffers."""
