"""A plugin of runs: prompts as short as those of the demo are shared, though that saves little."""

from rl_backend.data import prefixes

prefixes.SHORTEST_RUN = 2
