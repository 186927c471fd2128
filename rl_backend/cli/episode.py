"""``rl-backend episode``: an episode that the model plays before training."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "The options are those of `rl-backend episodes`; nothing is trained. It shows what the model is given and writes, "
        "its calls of tools with their answers, the rewards, and which tokens would be trained."
    )
    parser.add_argument("row", type=int, help="number of the row that is played, from 0")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the run, as `rl-backend episodes` takes them")


def run(arguments: argparse.Namespace) -> int:
    from actors.run.evaluation import show_episode
    from rl_backend.cli.check import config_type
    from rl_backend.cli.example import import_from_here
    from rl_backend.options.command_line import parse_config

    import_from_here()
    config = parse_config(config_type("episodes"), "An episode played before training.", arguments.options)
    print(show_episode(config, arguments.row))
    return 0
