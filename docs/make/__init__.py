"""Documents made of results and code: ``python -m docs.make``."""
