"""Options of runs."""
