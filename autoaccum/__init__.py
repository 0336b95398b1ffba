"""autoaccum."""
