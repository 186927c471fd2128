"""Collecting what steps train on: prompts or episodes, their rewards, staleness, held-out sets."""
