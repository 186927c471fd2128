"""Scripts to copy: GRPO and SFT on a model and data of one's own, and the demo that runs both."""
