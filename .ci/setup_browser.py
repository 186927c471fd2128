"""A Chromium for the tests that open the report in a browser: taken from the system's packages where that is allowed."""

from __future__ import annotations

import os
import shutil
import subprocess

from setup_pip import LOG, Step, last_lines

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LIMIT_SECONDS = 600


def find_or_install_browser() -> None:
    """Never fails: without a browser the tests that need one are skipped, and this says so."""
    if any(map(shutil.which, BROWSERS)):
        return
    problem = why_not_installed()
    if problem:
        print(
            f"  There is no Chromium ({problem}), so tests that open the report in a browser will be skipped. "
            "On Debian: apt-get install chromium",
            flush=True,
        )


def why_not_installed() -> str | None:
    """Installs Debian's package; why that could not be done, or None."""
    if shutil.which("apt-get") is None:
        return "this system has no apt-get"
    if os.geteuid() != 0:
        return "installing it takes root"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    output = ""
    with Step("Installing Chromium"), LOG.open("a") as log:
        # Package lists may be absent or old; where they cannot be fetched, the package may still be there.
        for arguments in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", "chromium"]):
            command = ["apt-get", *arguments]
            log.write(f"$ {' '.join(command)}\n")
            try:
                done = subprocess.run(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    timeout=LIMIT_SECONDS,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                return f"{' '.join(command)}: {error}"
            log.write(done.stdout)
            output = done.stdout
    if done.returncode != 0:
        return f"apt-get install failed: {last_lines(output, 1)}"
    return None if any(map(shutil.which, BROWSERS)) else "apt-get installed no browser"
