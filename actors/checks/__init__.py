"""Checks before anything starts: a run's options, model files, data, and this machine."""
