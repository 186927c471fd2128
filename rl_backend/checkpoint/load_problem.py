"""Why ``torch.load(weights_only=True)`` has refused a file."""

from __future__ import annotations

import re

_GLOBAL = re.compile(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)")


def load_problem(error: Exception) -> str:
    """``error`` in one line, without torch's advice to unpickle without limits what it has refused."""
    found = _GLOBAL.search(str(error))
    if found:
        return f"it {may_run(found[1])}"
    lines = [line for line in str(error).splitlines() if line.strip() and "`weights_only`" not in line]
    return f"{type(error).__name__}: {lines[0] if lines else 'it holds more than tensors'}"


def may_run(name: str) -> str:
    """What a file does that names a function which no checkpoint needs."""
    return f"asks for {name}, which may run commands; nothing of it was run, do not load it with other programs"
