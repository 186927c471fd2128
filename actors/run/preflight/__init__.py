"""Checks before anything starts: a run's options, model files, data, and this machine."""

from actors.run.preflight.checks import Finding as Finding
from actors.run.preflight.checks import check_start as check_start
from actors.run.preflight.checks import findings as findings
from actors.run.preflight.checks import preflight as preflight
