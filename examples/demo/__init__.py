"""The demo: a small model and a task made on the spot, a supervised warm start, then GRPO."""
