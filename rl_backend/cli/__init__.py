"""The ``rl-backend`` command. A sub-command imports what it needs when it runs."""
