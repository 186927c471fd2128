"""Names of a package that are imported when they are first used."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a package: its names are those that ``file`` imports for type checkers
    alone, under ``if TYPE_CHECKING``.
    """
    statements = ast.parse(Path(file).read_text(encoding="utf-8")).body
    imports = [each for block in statements if isinstance(block, ast.If) for each in block.body]
    modules = {alias.name: each.module for each in imports if isinstance(each, ast.ImportFrom) for alias in each.names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(modules)}")
        return getattr(importlib.import_module(str(modules[name])), name)

    return list(modules), get, lambda: sorted(modules)
