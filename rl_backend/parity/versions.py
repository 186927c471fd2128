"""Which packages computed."""

from __future__ import annotations

import importlib.metadata
import sys

PACKAGES = ("torch", "transformers", "megatron-core", "megatron-bridge", "transformer-engine")


def package_versions() -> dict[str, str]:
    """Version of each of the packages that this process has imported."""
    versions = {"python": sys.version.partition(" ")[0]}
    for package in PACKAGES:
        if package.replace("-", "_") in sys.modules or package.replace("-", ".") in sys.modules:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
    return versions
