"""Training groups: one Ray actor per rank, and operations that all ranks run."""
