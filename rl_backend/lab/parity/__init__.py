"""Comparison of two runtimes, each trained in its own processes from one checkpoint on the same batches."""
