"""Cost of token reducers against the prefill that they save."""
