"""Forms and models as the authors of baselines published them."""
