"""Feed-forward blocks, one kind in each file; see :mod:`rl_backend.model.blocks`."""
