"""LoRA tenants as flat rows of numbers beside a frozen model, the same for every runtime and layout."""
