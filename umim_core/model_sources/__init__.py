"""Models that come in files of other tools: packaged models and GGUF files, made directories."""
