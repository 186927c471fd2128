"""The folder of a run: lock, logs, checkpoints, state, and where a run begins."""
