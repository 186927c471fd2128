#!/bin/sh
# Makes .venv ready, or does nothing when it is. Finds a Python 3.12 that runs; .ci/setup_env.py does the rest with it.
# PYTHON=/path/to/python names the interpreter to use; DEVICE=cpu or DEVICE=gpu overrides what is detected.
set -u
cd "$(dirname "$0")/.." || exit 1
unset PYTHONHOME PYTHONPATH PYTHONSTARTUP
: "${HOME:=/nonexistent}"

if [ -f .venv/setup.json ] && .venv/bin/python -E -s .ci/setup_env.py --check 2>/dev/null; then
    exit 0
fi

is_python_312() {
    "$1" -I -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12) or sys.maxsize < 2**32)' >/dev/null 2>&1
}

makes_environments() {
    "$1" -I -c 'import ensurepip, venv' >/dev/null 2>&1
}

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

if [ -n "${PYTHON:-}" ]; then
    is_python_312 "$PYTHON" || fail "PYTHON=$PYTHON is not a 64-bit Python 3.12 that runs. Name another one, or leave PYTHON out to have one looked for."
    makes_environments "$PYTHON" || fail "PYTHON=$PYTHON lacks the modules venv and ensurepip. Install them (on Debian and Ubuntu: apt install python3.12-venv) or name another Python 3.12."
    exec "$PYTHON" -E -s .ci/setup_env.py
fi

found_without_venv=
found_broken=
for candidate in \
    python3.12 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python \
    "${XDG_DATA_HOME:-$HOME/.local/share}"/uv/python/cpython-3.12*/bin/python3.12 \
    "$HOME"/.local/share/mise/installs/python/3.12*/bin/python \
    "$HOME"/.asdf/installs/python/3.12*/bin/python \
    "${CONDA_PREFIX:-/nonexistent}"/bin/python \
    "$HOME"/miniconda3/envs/*/bin/python3.12 "$HOME"/miniforge3/envs/*/bin/python3.12 \
    /usr/local/bin/python3.12 /usr/bin/python3.12 /opt/python/3.12*/bin/python3 /opt/python3.12/bin/python3
do
    command -v "$candidate" >/dev/null 2>&1 || continue
    if ! is_python_312 "$candidate"; then
        [ "$candidate" = python3.12 ] && found_broken=$(command -v python3.12)
        continue
    fi
    if makes_environments "$candidate"; then
        exec "$candidate" -E -s .ci/setup_env.py
    fi
    found_without_venv=$(command -v "$candidate")
done

if [ -n "$found_without_venv" ]; then
    fail "$found_without_venv lacks the modules venv and ensurepip. Install them (on Debian and Ubuntu: apt install python3.12-venv), then run the same command again."
fi
if [ -n "$found_broken" ]; then
    fail "$found_broken is there but does not run as a 64-bit Python 3.12, and no other was found. Install one (apt install python3.12 python3.12-venv, pyenv install 3.12, or uv python install 3.12), or name one: make setup PYTHON=/path/to/python3.12"
fi
fail "no Python 3.12 was found, and this project needs that minor version. Install one (apt install python3.12 python3.12-venv, pyenv install 3.12, or uv python install 3.12), or name one: make setup PYTHON=/path/to/python3.12"
