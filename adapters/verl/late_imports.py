"""Changes to other packages: when a module is imported, and once for each function."""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_CHANGED = "_rl_backend_changed"


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Calls ``action`` with a module: now if it is imported, else as soon as it is."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _Late(name, action))


def wrap_once(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Puts ``around(original, *arguments)`` in the place of a function of ``owner``, unless that is done already."""
    original = getattr(owner, name)
    if hasattr(original, _CHANGED):
        return

    @functools.wraps(original)
    def changed(*arguments: Any, **options: Any) -> Any:
        return around(original, *arguments, **options)

    setattr(changed, _CHANGED, True)
    setattr(owner, name, changed)


class _Late(MetaPathFinder, Loader):
    """Finds one module by asking the finders after it, executes it as its loader does, and calls ``action`` with it."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._action = action
        self._loader: Loader = self

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            # As Python does: a finder of distributions alone need not have the method.
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None and spec.loader is not None:
                self._loader, spec.loader = spec.loader, self
                return spec
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action(module)
        sys.meta_path.remove(self)
