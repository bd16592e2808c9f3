"""Distillation: alignment masks, full-vocabulary loss, metrics, schedule and step."""
