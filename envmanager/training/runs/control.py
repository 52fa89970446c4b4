"""The control file, which the user edits to change a training run while it is in progress.

::

    # RUN/control.toml
    frozen = ["target"]       # these behaviors act greedily and do not learn, all others learn; [] freezes none
    checkpoint = true         # write a checkpoint now, once per change of this file

The rule: a version of the file is applied at most once, as a whole or not at all. A mistake in the file is logged once,
and the training continues unchanged.
"""

from __future__ import annotations

import logging
import stat
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import attrs

from envmanager.data.specs import describe_value
from envmanager.errors import ConfigError, UsageError
from envmanager.importing import needed_by
from envmanager.training.learners import unknown_behavior

with needed_by("envmanager.training", extra="torch"):
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib


EVERY_S = 1.0
"""Minimum time between two checks of the file, in seconds."""
LARGEST = 65_536
ALLOWED = 'Allowed are frozen = ["a behavior", …] and checkpoint = true or false.'
_logger = logging.getLogger("envmanager")


@attrs.frozen
class Control:
    """The requests in a control file. ``frozen`` replaces the set of frozen behaviors, unless it is None."""

    frozen: frozenset[str] | None = None
    checkpoint: bool = False


class ControlFile:
    """A reader of the control file at ``path``. ``seen``: the ``state`` of a version to skip, which was read before."""

    def __init__(self, path: Path, behaviors: Collection[str], *, seen: tuple[int, ...] | None = None) -> None:
        self._path = path
        self._behaviors = list(behaviors)
        self.state = seen
        """Modification time (ns), size and inode of the file at its last read, for checkpoints; None if never read."""
        self._due = 0.0

    def obey(self, carry_out: Callable[[Control], Any], now: float) -> None:
        """Pass the requests of a changed file to ``carry_out``. Checks the file at most every ``EVERY_S`` seconds.

        ``now`` is from ``time.monotonic``. Mistakes in the file, and a UsageError from ``carry_out``, are only logged.
        """
        if now < self._due:
            return
        self._due = now + EVERY_S
        try:
            text = self._changed()
            if text is not None:
                carry_out(_understood(text, self._behaviors))
        except UsageError as error:  # a mistake in the file must not end the training
            _logger.warning("%s: %s %s Nothing in it was carried out.", self._path, error, ALLOWED)

    def _changed(self) -> str | None:
        """Return the file's text if it exists and has changed, else None. Raises ConfigError if it cannot be read."""
        try:
            found = self._path.stat()
        except OSError:  # usually the file does not exist
            return None
        state = (found.st_mtime_ns, found.st_size, found.st_ino)
        if state == self.state:
            return None
        self.state = state
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST:
            raise ConfigError(f"this is not a file of at most {LARGEST:,} bytes.")
        try:
            return self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"this cannot be read: {error}.") from error


def _understood(text: str, behaviors: Collection[str]) -> Control:
    """Parse and check the text of a control file, and return its requests. Raises ConfigError for a mistake."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: also too many digits, too deep nesting
        raise ConfigError(f"this is not valid TOML: {error}.") from error
    for key in tables:
        if key not in ("frozen", "checkpoint"):
            raise ConfigError(f"there is no option {key!r}.")
    names, checkpoint = tables.get("frozen"), tables.get("checkpoint", False)
    if names is not None:
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"frozen should be a list of behaviors, but is {describe_value(names)}.")
        for name in names:
            if name not in behaviors:
                raise ConfigError(f"frozen names {unknown_behavior(name, list(behaviors))}")
    if not isinstance(checkpoint, bool):
        raise ConfigError(f"checkpoint should be true or false, but is {describe_value(checkpoint)}.")
    return Control(None if names is None else frozenset(names), checkpoint)
