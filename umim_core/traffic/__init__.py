"""Logged requests: what they hold, and what merged spans would save of them."""
