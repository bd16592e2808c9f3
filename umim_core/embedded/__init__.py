"""Data shipped with the package: docstring corpus, tokenizer and multiple-choice task."""
