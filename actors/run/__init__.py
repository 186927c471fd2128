"""A run: its records."""
