"""``rl-backend example``, and ``rl-backend grpo`` and its like: example scripts that came with the package."""

import argparse
import os
import runpy
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import rl_backend
from rl_backend.options.parser import CommandError

EXAMPLES = {
    "grpo": "GRPO and its relatives: policy, optional reference, vLLM",
    "ppo": "PPO: actor, critic, optional reference, vLLM",
    "sft": "supervised fine-tuning",
    "eval": "an evaluation alone: a model answers held-out prompts in vLLM",
    "episodes": "episodes of many turns with environments and tools: GRPO or PPO",
    "tenants": "several users at once, each with a LoRA adapter over one model",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", choices=tuple(EXAMPLES), help="which one runs; without it, all are listed")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the example, whose own --help lists them")


def run(arguments: argparse.Namespace) -> int:
    if arguments.name is None:
        for name, purpose in EXAMPLES.items():
            print(f"{name:9}{purpose}: {example_file(name)}")
        recipes = example_file("grpo").parent / "recipes"
        names = ", ".join(sorted(file.stem for file in recipes.glob("*.json")))
        print(f"{'recipes':9}for grpo --config, of {names}: {recipes / 'NAME.json'}")
        return 0
    return run_example(arguments.name, arguments.options)


def run_example(name: str, options: Sequence[str]) -> int:
    file = str(example_file(name))
    import_from_here()
    sys.argv = [file, *options]
    runpy.run_path(file, run_name="__main__")
    return 0


def import_from_here() -> None:
    # Last, so that no file there takes the place of an installed module.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def example_file(name: str) -> Path:
    """An example in the source tree, or where pip puts it."""
    parent = Path(rl_backend.__file__).resolve().parents[1]
    if (parent / "pyproject.toml").is_file():
        return parent / "examples" / f"{name}.py"
    # Beside the packages with pip install --target, else below the environment or the user's own folder.
    roots = [parent, Path(sysconfig.get_path("data")), *map(Path, filter(None, [site.getuserbase()]))]
    places = [root / "share" / "rl_backend" / "examples" / f"{name}.py" for root in roots]
    for place in places:
        if place.is_file():
            return place
    raise CommandError(f"{name}.py is in none of {', '.join(map(str, places))}: install rl-backend again")
