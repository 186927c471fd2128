"""Ray actors around the backend: training groups, rollout groups of vLLM engines, and weight sync between them."""
