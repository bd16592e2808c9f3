"""Other engines on an exported model: prompts of raw ids against the same prompts merged."""
