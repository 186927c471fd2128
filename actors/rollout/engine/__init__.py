"""The actor of one vLLM engine, and its parts."""
