"""The file of a recording: a sequence of records in an MCAP container, each compressed and with a checksum of its own.

::

    content ── pickled ── zstd, with its checksum ──▶ a message of the container ── written at once ──▶ run.emrec

The rule: a file that ends in the middle, because its writer was killed, is read up to its last whole record. Any other
damage is an error. A recording is unpickled, so read only those that you trust, as with a program.
"""

from __future__ import annotations

import pickle
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

import attrs

from envmanager.errors import EnvManagerError, UsageError
from envmanager.importing import needed_by

with needed_by("recordings", extra="record"):
    import zstandard
    from mcap.exceptions import EndOfFile
    from mcap.records import Channel, Footer, Message
    from mcap.stream_reader import StreamReader
    from mcap.writer import IndexType, Writer

FORMAT = 1
_PROFILE = "envmanager"
_ENCODING = "envmanager-pickle-zstd"
_LEVEL = 1
_LARGEST_RECORD = 1 << 32


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
        """Create the file. Raises OSError if that is impossible."""
        self._file: IO[bytes] = open(path, "wb", buffering=0)  # noqa: SIM115
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        whole: Any = _Whole(self._file)
        self._writer = Writer(
            whole, use_chunking=False, index_types=IndexType.NONE, use_statistics=False, enable_crcs=False
        )
        self._writer.start(profile=_PROFILE, library=f"envmanager {FORMAT}")
        self._channels: dict[str, int] = {}

    def write(self, kind: str, time_ns: int, content: Any) -> None:
        """Append a record. Raises OSError if it cannot be written."""
        if kind not in self._channels:
            self._channels[kind] = self._writer.register_channel(kind, _ENCODING, schema_id=0)
        data = self._compressor.compress(pickle.dumps(content, protocol=5))
        self._writer.add_message(self._channels[kind], log_time=time_ns, data=data, publish_time=time_ns)

    def close(self) -> None:
        """Write the end of the file, which says that it is complete."""
        try:
            self._writer.finish()  # type: ignore[no-untyped-call]
        finally:
            self._file.close()


class _Whole:
    """A stream that passes each write on whole: an unbuffered file may write a part of the bytes only."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        return len(data)

    def flush(self) -> None:
        pass

    def tell(self) -> int:
        return self._file.tell()


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
                    number += 1
                    yield Record(
                        kinds[each.channel_id], each.log_time, pickle.loads(decompressor.decompress(each.data))
                    )
                elif isinstance(each, Footer):
                    return
        except EndOfFile as error:
            if not number:
                raise BadRecording(f"{path} has no whole record.") from error
        except EnvManagerError:
            raise
        except Exception as error:  # what a damaged file makes of the container's reader
            raise BadRecording(
                f"{path} is no recording, or is damaged after record {number}: {type(error).__name__}: {error}"
            ) from error
