"""Memory that a model takes on each rank, computed before anything is started: ``rl-backend plan``."""
