"""The error of a command that could not do its work; known without torch, unlike the backend's own errors."""

from __future__ import annotations


class CommandError(Exception):
    """What was wrong and what to do, in one message."""
