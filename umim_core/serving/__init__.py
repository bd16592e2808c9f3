"""Serving: merged prompts for engines that know nothing of UMIM."""
