"""Mining: frequent n-grams or confident spans of a corpus, found and counted exactly."""
