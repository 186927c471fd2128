"""Follows a child process of a test, for :mod:`tests.mutations.reach`."""

import importlib.util
import os
from pathlib import Path

if folder := os.environ.get("REACH_HERE"):
    found = importlib.util.spec_from_file_location("reach", Path(__file__).parents[1] / "reach.py")
    assert found is not None and found.loader is not None
    reach = importlib.util.module_from_spec(found)
    found.loader.exec_module(reach)
    reach.follow(folder)
