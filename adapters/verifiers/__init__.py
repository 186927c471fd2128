"""Environments of verifiers 0.4 as players of episodes: they run in a process of their own Python, and ask us for tokens."""

from adapters.verifiers.player import VerifiersPlayer as VerifiersPlayer
from adapters.verifiers.process import VerifiersSettings as VerifiersSettings
