"""``python -m benchmarks``, in a checkout with the extra ``bench``."""

from __future__ import annotations

import sys

from envmanager.cli.loading import loading
from envmanager.importing import needed_by

if __name__ == "__main__":
    with loading(), needed_by("python -m benchmarks", extra="bench"):
        from benchmarks.command import app
        from envmanager.cli.app import run_command_line
    sys.exit(run_command_line(sys.argv[1:], app))
