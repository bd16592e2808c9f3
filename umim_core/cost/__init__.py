"""Predicted costs of mining and of distillation, before either runs."""
