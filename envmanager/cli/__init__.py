"""The command line: ``envmanager run``, ``train``, ``evaluate``, ``play``, ``export``, ``tune``, ``check``, ``godot``.

If Typer or Rich is not installed, every command prints how to install the extra ``cli`` and exits with code 1.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from envmanager.cli.loading import EXIT_INTERRUPTED, loading

NEEDED = ("typer", "rich")


def main() -> int:
    """Run the command in ``sys.argv`` and return its exit code, which is 130 after an unhandled Ctrl-C."""
    try:
        return _main()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _main() -> int:
    missing = [library for library in NEEDED if find_spec(library) is None]
    if missing:
        print(
            f"The command line needs {' and '.join(missing)}, not installed here: pip install 'envmanager[cli]'",
            file=sys.stderr,
        )
        return 1
    with loading():
        from envmanager.cli.app import run_command_line
    return run_command_line(sys.argv[1:])
