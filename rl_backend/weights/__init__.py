"""Weights on the move: layout, digests, finite values, and comparison with what an engine loads."""
