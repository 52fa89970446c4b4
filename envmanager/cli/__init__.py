"""The command line: ``envmanager run``, ``train``, ``evaluate``, ``play``, ``export``, ``check``, ``godot``.

If Typer or Rich cannot be imported, every command prints why, or how to install the extra ``cli``, and exits with 1.
"""

from __future__ import annotations

import gc
import sys

from envmanager.cli.loading import EXIT_INTERRUPTED, loading
from envmanager.errors import ImportFailed
from envmanager.importing import needed_by


def main() -> int:
    """Run the command in ``sys.argv`` and return its exit code, which is 130 after an unhandled Ctrl-C."""
    try:
        with loading(), needed_by("the command line", extra="cli"):
            from envmanager.cli.app import run_command_line
        return run_command_line(sys.argv[1:])
    except ImportFailed as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        gc.freeze()  # else Python's exit visits all that PyTorch has made: 0.1 instead of 0.9 s after a SIGTERM
