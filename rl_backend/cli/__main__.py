"""``python -m rl_backend.cli``: the ``rl-backend`` command for interpreters in which the package is not installed."""

import sys

from rl_backend.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
