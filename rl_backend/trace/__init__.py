"""Recording what every process of a run does when, and writing it as a Chrome trace."""

from rl_backend.trace.recorder import span as span
