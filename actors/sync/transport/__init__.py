"""Ways for weights to travel from a training group into running vLLM engines, one file each."""
