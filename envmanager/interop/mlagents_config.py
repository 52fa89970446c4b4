"""Conversion of cattrs' errors about ML-Agents' config files to ML-Agents' own TrainerConfigError.

ML-Agents was written for an old cattrs, which raised each error directly. The newer cattrs that this library needs
raises exception groups, which ML-Agents does not catch and whose text does not say what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cattrs.errors import AttributeValidationNote, BaseValidationError, ClassValidationError, IterableValidationError

from envmanager.importing import needed_by

with needed_by("MlagentsEnvManager", extra=None):
    from mlagents.trainers.exception import TrainerConfigError


@contextmanager
def config_errors() -> Iterator[None]:
    """Return a context manager that converts cattrs' errors to a TrainerConfigError with one line per mistake.

    Use the context around calls that read a config, such as ``parse_command_line`` and ``RunOptions.from_dict``.
    """
    try:
        yield
    except BaseValidationError as error:
        raise TrainerConfigError("\n".join(_complaints(error, ""))) from None


def _complaints(error: BaseException, path: str) -> Iterator[str]:
    if not isinstance(error, ClassValidationError | IterableValidationError):
        yield f"{path}: {error}" if path else str(error)
        return
    noted, alone = error.group_exceptions()
    for child, note in noted:
        step = note.name if isinstance(note, AttributeValidationNote) else str(note.index)
        yield from _complaints(child, f"{path}.{step}" if path else step)
    for child in alone:
        yield from _complaints(child, path)
