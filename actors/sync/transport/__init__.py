"""Transports of weights from a training group into running vLLM engines."""
