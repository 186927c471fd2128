"""Rollout groups: vLLM engines in Ray actors, and the samples that they return."""
