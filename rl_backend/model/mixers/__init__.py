"""Mixers of tokens, one kind in each file; see :mod:`rl_backend.model.blocks`."""
