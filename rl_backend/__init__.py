"""A training backend for RL on language models: the atomic operations of distributed training behind one interface."""

__version__ = "0.1.0"
