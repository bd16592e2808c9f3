"""Plan of a recipe before it runs: its stages and what they cost."""
