"""The file of a recording: a sequence of records in an MCAP container, each compressed and with a checksum of its own.

::

    content ── pickled ── zstd, with its checksum ──▶ a message of the container ── written at once ──▶ run.emrec

The rule: a file that ends in the middle, because its writer was killed, is read up to its last whole record. Any other
damage is an error: messages are numbered, and the end of a complete file says how many there are. A recording is
unpickled, so read only those that you trust, as with a program.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

import attrs

from envmanager.errors import EnvManagerError, UsageError
from envmanager.importing import needed_by
from envmanager.system.machine import absolute, open_privately

with needed_by("recordings", extra="record"):
    import zstandard
    from mcap.exceptions import EndOfFile
    from mcap.records import Channel, Footer, Message, Statistics
    from mcap.stream_reader import StreamReader
    from mcap.writer import IndexType, Writer

FORMAT = 1
_PROFILE = "envmanager"
_ENCODING = "envmanager-pickle-zstd"
_LEVEL = 1
_LARGEST_RECORD = 1 << 32
_LARGEST_WRITE = 1 << 20
"""Number of bytes that are written at once, so that those who wait see the file grow."""
_KINDS = ("about", "facts")
_MAGIC = b"\x89MCAP0\r\n"
"""First and last bytes of a complete file."""
_being_written: set[str] = set()


class BadRecording(EnvManagerError):
    """Error raised when a file is no recording, or is damaged."""


@attrs.frozen
class Record:
    """One record: its ``kind``, ``"about"`` or ``"facts"``, its time in ns since the epoch, and its content."""

    kind: str
    time_ns: int
    content: Any


class RecordWriter:
    """Writes records to a file, each at once."""

    def __init__(self, path: str) -> None:
        """Create the file, which only the user can read.

        Raises OSError if that is impossible, and UsageError if another manager of this process is writing the file.
        """
        self._path = absolute(path)  # the trainer may change its directory
        if self._path in _being_written:
            raise UsageError(f"the recording {path} is being written by another manager: name a file for each.")
        self._file: IO[bytes] = open(path, "wb", buffering=0, opener=open_privately)  # noqa: SIM115
        if sys.platform != "win32":
            os.set_blocking(self._file.fileno(), True)
        _being_written.add(self._path)
        self.n_written = self._number = 0
        """Number of bytes written so far, and of records."""
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self._writer = Writer(self, use_chunking=False, index_types=IndexType.NONE, enable_crcs=False)  # type: ignore[arg-type]
        self._channels: dict[str, int] = {}

    def add(self, kind: str, time_ns: int, content: Any) -> int:
        """Append a record, and return its size before compression. Raises OSError if it cannot be written."""
        if not self._channels:
            self._writer.start(profile=_PROFILE, library=f"envmanager {FORMAT}")
        if kind not in self._channels:
            self._channels[kind] = self._writer.register_channel(kind, _ENCODING, schema_id=0)
        data = pickle.dumps(content, protocol=5)
        packed = self._compressor.compress(data)
        self._writer.add_message(self._channels[kind], time_ns, packed, time_ns, sequence=self._number % (1 << 32))
        self._number += 1
        return len(data)

    def finish(self) -> None:
        """Write the end of the file, which says that it is complete. Raises OSError if it cannot be written."""
        self._writer.finish()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close the file."""
        _being_written.discard(self._path)
        self._file.close()

    # The stream of the container's writer.

    def write(self, data: bytes) -> int:
        """Write all bytes, although an unbuffered file may write a part of them only."""
        view = memoryview(data)
        while view:
            n = self._file.write(view[:_LARGEST_WRITE])
            view, self.n_written = view[n:], self.n_written + n
        return len(data)

    def flush(self) -> None:
        """Do nothing: everything was written at once."""

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self.n_written


def read_records(path: str | Path) -> Generator[Record, None, None]:
    """Yield the records of a file. Raises BadRecording if it is none or damaged, and UsageError if there is none.

    A file that ends in the middle of a record ends with the record before.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"the recording {path} cannot be read: {error}.") from error
    decompressor = zstandard.ZstdDecompressor()
    kinds: dict[int, str] = {}
    number = 0
    with file:
        try:
            for each in StreamReader(file, record_size_limit=_LARGEST_RECORD).records:
                if isinstance(each, Channel):
                    kinds[each.id] = each.topic
                elif isinstance(each, Message):
                    if each.sequence != number % (1 << 32) or kinds[each.channel_id] not in _KINDS:
                        raise BadRecording(f"{path} is damaged after record {number}: the next one is missing.")
                    number += 1
                    yield Record(
                        kinds[each.channel_id], each.log_time, pickle.loads(decompressor.decompress(each.data))
                    )
                elif isinstance(each, Statistics) and each.message_count != number:
                    raise BadRecording(f"{path} is damaged after record {number}: the last ones are missing.")
                elif isinstance(each, Footer):
                    return
        except EndOfFile as error:
            file.seek(-len(_MAGIC), os.SEEK_END)
            if not number or file.read() == _MAGIC:
                what = "has no whole record" if not number else f"is damaged after record {number}"
                raise BadRecording(f"{path} {what}.") from error
        except EnvManagerError:
            raise
        except Exception as error:  # what a damaged file makes of the container's reader
            raise BadRecording(
                f"{path} is no recording, or is damaged after record {number}: {type(error).__name__}: {error}"
            ) from error
