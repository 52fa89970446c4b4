"""Conversion of cattrs' errors about ML-Agents' config files to ML-Agents' own TrainerConfigError.

ML-Agents was written for an old cattrs, which raised each error directly. The newer cattrs that this library needs
raises exception groups, which ML-Agents does not catch and whose text does not say what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cattrs import transform_error
from cattrs.errors import BaseValidationError

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
        raise TrainerConfigError("\n".join(transform_error(error, "config", lambda mistake, _: str(mistake)))) from None
