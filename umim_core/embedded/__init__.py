"""What ships with the package: the docstring corpus, its tokenizer and its multiple-choice task."""
