"""Worker process that calls plain reward functions, and the lookup of functions.

python -P worker.py DESCRIPTOR     DESCRIPTOR: of the connection to the run

It needs the standard library alone: importing the package would bring torch, and seconds, to every process.
"""

import hashlib
import importlib
import importlib.util
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any


def module_at(location: str) -> ModuleType:
    """``package.module``, or the module in ``path/to/file.py``; raises whatever importing it raises."""
    if not location.endswith(".py"):
        return importlib.import_module(location)
    path = Path(location).resolve()
    name = _name_at(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a name that ends with .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look their module up here while the file runs.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def location_of(module: ModuleType) -> str | None:
    """By which :func:`module_at` finds a module again in another process; None where it cannot."""
    file: str | None = getattr(module, "__file__", None)
    if module.__name__ == "__main__" or (file and module.__name__ == _name_at(Path(file))):
        return file
    return module.__name__


def _name_at(path: Path) -> str:
    return f"reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def what_it_raised(error: BaseException) -> str:
    """Kind, message and place: ``ValueError: no number (my_reward.py:12)``."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    kind = type(error).__name__
    return f"{kind}: {error}{place}" if str(error) else f"{kind}{place}"


def serve(connection: Connection) -> None:
    """Answers requests: (which function, its arguments) with (whether it returned, result or error)."""
    # The run ends the process, and the kernel does when the run ends, even in the middle of a call.
    specs, path = connection.recv()
    sys.path[:] = path
    try:
        functions = [getattr(module_at(location), name) for location, _, name in (spec.rpartition(":") for spec in specs)]
    except BaseException as error:  # noqa: BLE001, the run raises it
        connection.send((False, what_it_raised(error)))
        return
    connection.send((True, None))
    while True:
        index, arguments = connection.recv()
        connection.send_bytes(_answer(functions[index], arguments))


def _answer(function: Any, arguments: dict[str, Any]) -> bytes:
    # Pickled inside of the try: a result that cannot be pickled is the function's failure.
    try:
        return pickle.dumps((True, function(**arguments)))
    except BaseException as error:  # noqa: BLE001, the run decides what comes of it
        return pickle.dumps((False, what_it_raised(error)))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
