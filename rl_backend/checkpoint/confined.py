"""Names and links confined to a folder."""

from pathlib import Path, PurePosixPath

from rl_backend.contracts import CheckpointError


def name_problem(name: str, depth: int = 1) -> str | None:
    """Why ``name`` is no name of a file at most ``depth`` levels inside of a folder; None where it is one."""
    parts = PurePosixPath(name).parts
    if not parts or "\0" in name or "\\" in name:
        return "is no name of a file"
    if name.startswith("/"):
        return "is an absolute name"
    if ".." in parts:
        return "leads out of the folder"
    if len(parts) > depth:
        return "is no name of a file beside it" if depth == 1 else f"has more than {depth} levels"
    if str(PurePosixPath(name)) != name:
        return f"must be written {str(PurePosixPath(name))!r}"
    return None


def require_names(names: object, depth: int = 1) -> None:
    """Raises :class:`ValueError` for the first of ``names``, a mapping's keys, with a :func:`name_problem`."""
    for name in names if isinstance(names, dict) else ():
        problem = name_problem(str(name), depth)
        if problem:
            raise ValueError(f"it names {name!r}, which {problem}; only files of the folder are read")


def require_inside(folder: Path, name: str) -> Path:
    """``folder / name``; :class:`CheckpointError` for a link on the way out of ``folder``, which itself may be one."""
    file, problem = folder / name, None
    try:
        found = file.resolve()
        if not found.is_relative_to(folder.resolve()):
            problem = f"is a link out of it, to {found}"
    except (OSError, RuntimeError) as error:  # pathlib raises RuntimeError for links that lead to each other
        problem = f"cannot be followed to a file ({error})"
    if problem:
        remedy = "put a copy of the file in its place if you trust it"
        raise CheckpointError.at(folder, f"is refused: {name} {problem}; {remedy}", name=name, is_damaged=False)
    return file


def require_inside_model(directory: Path, name: str) -> Path:
    """:func:`require_inside` for a Hugging Face directory."""
    # A snapshot in huggingface_hub's cache links to blobs beside it in its repository.
    snapshot = directory.resolve()
    repository = snapshot.parent.parent
    if snapshot.parent.name == "snapshots" and (repository / "blobs").is_dir():
        return require_inside(repository, f"snapshots/{snapshot.name}/{name}")
    return require_inside(directory, name)
