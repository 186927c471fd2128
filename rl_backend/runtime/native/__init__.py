"""The native runtime: PyTorch alone, in every layout of ``ParallelConfig``."""
