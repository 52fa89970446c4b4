"""The command line, as ``python -m envmanager``."""

from envmanager.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
