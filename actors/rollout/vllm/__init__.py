"""The part that runs inside the process of a vLLM engine."""
