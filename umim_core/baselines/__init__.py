"""Other ways to shorten what a frozen model reads: three protocols, and one file per method."""
