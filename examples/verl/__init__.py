"""verl's own trainers on our engine: SFT, GRPO and PPO, on the demo's task or on a model and files of one's own."""
