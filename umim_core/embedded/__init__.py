"""Data shipped with the package: docstring corpus, tokenizer, backbones and checkpoints."""
