"""LoRA tenants: trained beside each other on the frozen weights of one model."""
