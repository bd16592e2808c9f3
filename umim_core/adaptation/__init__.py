"""Task adaptation: multiple-choice questions as training sequences, and the preference loss."""
