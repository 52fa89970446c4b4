"""The file of a recording: a head, and records, each of which is compressed and has checksums of its own.

::

    head      magic, with the number of the format
    record    length, time, CRC of the content, CRC of these and of those before ── content, packed and compressed
    end       a record of length 0

The rule: a file that ends in the middle, because its writer was killed, is read up to its last whole record. Any other
damage is an error: checksums go on from record to record, so that none can be missing, and each length has one before
it is used.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import struct
import sys
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any, NamedTuple

from envmanager.errors import EnvManagerError, UsageError
from envmanager.importing import needed_by
from envmanager.recording.codec import Apart, packed, unpacked
from envmanager.system.machine import absolute, open_privately

with needed_by("recordings", extra="record"):
    import zstandard

if sys.platform != "win32":
    import fcntl

FORMAT = 2
_LEVEL = 1
_LARGEST_WRITE = 1 << 20
"""Number of bytes that are written at once, so that those who wait see the file grow."""
_MAGIC, _MAGIC_OF_1 = b"\x89EMREC%d\n" % FORMAT, b"\x89MCAP0\r\n"
_RECORD = struct.Struct("<QQI")
_CRC = struct.Struct("<I")
_further_parts: dict[str, tuple[int, int]] = {}
"""What ``further_part`` knows of the parts that it has returned, by path: ``part_of`` and ``n_steps`` of the writer."""


class BadRecording(EnvManagerError):
    """Error raised when a file is no recording, or is damaged."""


class Record(NamedTuple):
    """One record: its time in ns since the epoch, and its packed content."""

    time_ns: int
    data: bytes


class Fact(NamedTuple):
    """What was asked or answered (see ``Tape``), by which worker (-1: by none), and its packed content."""

    what: str
    worker_id: int
    data: bytes

    def content(self, read_apart: Callable[[Apart], Any] = Apart.leave) -> Any:
        """Return the content. ``read_apart`` reads what is apart in it. Raises BadRecording if it cannot be read."""
        return _content(self.data, read_apart)


class RecordWriter:
    """Writes records to a file, each at once. An earlier recording of that name, and its further parts, are renamed."""

    def __init__(self, path: str) -> None:
        """Create the file, which only the user can read.

        Raises OSError if that is impossible, and UsageError if another manager, perhaps of another process, is writing
        the file.
        """
        self.moved: list[tuple[str, str]] = []
        """Names of the files of the earlier recording, before and after they were renamed."""
        self._path = absolute(path)  # the trainer may change its directory
        self._file = self._opened(self._path)
        if sys.platform != "win32":
            os.set_blocking(self._file.fileno(), True)
        self.n_written = self._crc = 0
        """Number of bytes written so far, and the checksum that goes on from record to record."""
        self.part_of, self.n_steps = _further_parts.pop(self._path, (0, 0))
        """Time of the first record of the first part, if this is a further one, and agent steps before it; else 0."""
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)

    def _opened(self, path: str) -> IO[bytes]:
        while True:
            file = open(path, "ab", buffering=0, opener=open_privately)  # noqa: SIM115
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            if is_file and not _lock(file):
                file.close()
                raise UsageError(
                    f"the recording {path} is being written by another manager, here or in another process: name a "
                    "file for each."
                )
            if not is_file or not os.fstat(file.fileno()).st_size:
                return file
            file.close()  # Windows renames no open file
            self.moved += _rename(path)

    def put_back(self) -> None:
        """Replace the closed file with the earlier recording, if there was one."""
        with contextlib.suppress(OSError):
            for before, now in self.moved:
                os.replace(now, before)
        self.moved = []

    def add(self, time_ns: int, content: Any) -> int:
        """Append a record, and return its size before compression. Raises OSError if it cannot be written."""
        if not self.n_written:
            self._write(_MAGIC)
        data = packed(content)
        self._add(time_ns, self._compressor.compress(data))
        return len(data)

    def finish(self) -> None:
        """Write the end of the file, which says that it is complete. Raises OSError if it cannot be written."""
        self._add(0, b"")

    def _add(self, time_ns: int, data: bytes) -> None:
        start = _RECORD.pack(len(data), time_ns, zlib.crc32(data))
        self._crc = zlib.crc32(start, self._crc)
        self._write(start + _CRC.pack(self._crc) + data)

    def _write(self, data: bytes) -> None:
        """Write all bytes, although an unbuffered file may write a part of them only."""
        view = memoryview(data)
        while view:
            n = self._file.write(view[:_LARGEST_WRITE])
            view, self.n_written = view[n:], self.n_written + n

    def close(self) -> None:
        """Close the file."""
        if sys.platform != "win32" and not self._file.closed:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)  # which a forked process may hold too
        self._file.close()


def read_records(path: str | Path) -> Generator[Record, None, None]:
    """Yield the records of a file. Raises BadRecording if it is none or damaged, and UsageError if there is none.

    A file that ends in the middle of a record ends with the record before.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"the recording {path} cannot be read: {error}.") from error
    decompressor = zstandard.ZstdDecompressor()
    with file:
        try:
            _check_head(path, file.read(len(_MAGIC)))
            crc = number = 0
            while len(start := file.read(_RECORD.size + _CRC.size)) == _RECORD.size + _CRC.size:
                length, time_ns, crc_of_data = _RECORD.unpack_from(start)
                crc = zlib.crc32(start[: _RECORD.size], crc)
                if crc != _CRC.unpack_from(start, _RECORD.size)[0]:
                    raise BadRecording(f"{path} is damaged after record {number}.")
                if not length:
                    if file.read(1):
                        raise BadRecording(f"{path} is damaged after record {number}, its last one.")
                    return
                data = file.read(length)
                if len(data) < length:
                    break
                if zlib.crc32(data) != crc_of_data:
                    raise BadRecording(f"{path} is damaged after record {number}.")
                number += 1
                yield Record(time_ns, decompressor.decompress(data))
            if not number:
                raise BadRecording(f"{path} has no whole record.")
        except (OSError, MemoryError, OverflowError, zstandard.ZstdError) as error:
            raise BadRecording(f"{path} cannot be read after record {number}: {error}") from error


def read_facts(path: str | Path) -> Generator[Any, None, None]:
    """Yield what a recording says of itself, a mapping, and then its facts. Raises the errors of ``read_records``."""
    with contextlib.closing(read_records(path)) as records:
        for number, record in enumerate(records):
            content = _content(record.data, Apart.leave)
            if number:
                yield from itertools.starmap(Fact, content)
            else:
                yield content


def _content(data: bytes, read_apart: Callable[[Apart], Any]) -> Any:
    try:
        return unpacked(data, read_apart)
    except EnvManagerError:
        raise
    except Exception as error:  # what data that nothing of this library has written makes of pickle and NumPy
        raise BadRecording(f"a record of a recording cannot be read: {type(error).__name__}: {error}") from error


def _check_head(path: str | Path, head: bytes) -> None:
    if head.startswith(_MAGIC_OF_1):
        raise BadRecording(
            f"{path} was written by an earlier version of envmanager (format 1, in an MCAP container), which this one "
            "does not read: record the run again, or read it with that version."
        )
    if head != _MAGIC:
        raise BadRecording(f"{path} is no recording of format {FORMAT}, the one that this version of envmanager reads.")


def parts_of(path: str | Path) -> list[str]:
    """Return the paths of a recording and of its further parts, ``run.emrec``, ``run.2.emrec``, …, in their order.

    A resumed training makes further parts. Raises UsageError if there is no file, and BadRecording if it is none.
    """
    found, (first_ns, _) = [str(path)], _first_of(path)
    with contextlib.suppress(EnvManagerError):  # the next one is not there, or is no recording
        while _first_of(more := _part(path, len(found) + 1))[1] == first_ns:
            found.append(more)
    return found


def begins_of_parts(path: str | Path) -> dict[int, str]:
    """Return the parts that make up a recorded training, by the agent steps before each, in their order.

    A part goes on from a checkpoint. What the parts before it have recorded after that, and parts that begin there or
    later, belong to no such training.
    """
    begins: dict[int, str] = {}
    for part in parts_of(path):
        n_steps = next(read_facts(part)).get("n_steps", 0)
        begins = {before: own for before, own in begins.items() if before < n_steps} | {n_steps: part}
    return begins


def further_part(path: str, n_steps: int) -> str:
    """Return the path of the next part of a recording, or ``path`` if there is none yet.

    ``n_steps``: agent steps of the training before that part.
    """
    try:
        more = _part(path, len(parts_of(path)) + 1)
    except EnvManagerError:
        return path
    _further_parts[absolute(more)] = _first_of(path)[0], n_steps
    return more


def _first_of(path: str | Path) -> tuple[int, int]:
    """Return the time of the first record, and its ``part_of``. Raises the errors of ``read_records``."""
    with contextlib.closing(read_records(path)) as records:
        first = next(records)
    return first.time_ns, _content(first.data, Apart.leave)["part_of"]


def _part(path: str | Path, number: int) -> str:
    folder, name = os.path.split(path)
    stem, suffix, end = name.rpartition(".emrec")
    part = f"{stem}.{number}{suffix}{end}" if suffix else f"{name}.{number}"
    return str(path) if number == 1 else os.path.join(folder, part)


def _lock(file: IO[bytes]) -> bool:
    """Lock a file until it is closed. Return False if it is locked by another one."""
    if sys.platform != "win32":  # which renames no open file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return not isinstance(error, BlockingIOError)  # a file system without locks
    return True


def _rename(path: str) -> list[tuple[str, str]]:
    """Rename a recording and its parts to run.emrec.1, run.2.emrec.1, or the first number that is free for all."""
    parts = [path]
    with contextlib.suppress(EnvManagerError):  # it is no recording
        parts = parts_of(path)
    for number in itertools.count(1):
        moves = [(part, _part(f"{path}.{number}", place)) for place, part in enumerate(parts, 1)]
        if not any(os.path.lexists(to) for _, to in moves):
            for part, to in moves:
                os.rename(part, to)
            return moves
    raise AssertionError
