"""Accepted requests of one model on disk, so that a server that was killed does the same work again.

    accept ──> append, sync ──> acknowledge ──> work ──> saved state ──> a new journal without what the state holds

A journal is a file of records: kind, sequence number, length, CRC and bytes. A record whose end is missing was never
acknowledged. `rewrite` replaces a journal whole or not at all.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rlite.errors import StorageError, why_not_written
from rlite.files import replace, sync

logger = logging.getLogger(__name__)
_HEAD = struct.Struct("<cQQI")
REQUEST, RESULT, STATE = b"Q", b"R", b"S"
"""kinds of records: a request that was accepted, a result that clients may still ask for, and a saved state"""


class Record(NamedTuple):
    """One record."""

    kind: bytes
    seq_id: int
    body: bytes

    @property
    def crc(self) -> int:
        """Checksum of the record."""
        return zlib.crc32(self.body, zlib.crc32(self.kind + self.seq_id.to_bytes(8, "little")))

    def encoded(self) -> bytes:
        """Return the record's bytes in the file."""
        return _HEAD.pack(self.kind, self.seq_id, len(self.body), self.crc) + self.body


class Journal:
    """The journal of one model. Its methods may be called from any thread.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._turn = path, threading.Lock()
        self.num_bytes = 0

    def read(self) -> list[Record]:
        """Return the records, in their order, and cut off a record that was not written whole."""
        with self._turn:
            records = self._records()
            self.num_bytes = sum(_HEAD.size + len(record.body) for record in records)
            if self._path.exists() and (size := self._path.stat().st_size) > self.num_bytes:
                told = "their writing was cut off before the request was acknowledged"
                logger.warning("%s: the last %d bytes are dropped: %s", self._path, size - self.num_bytes, told)
                os.truncate(self._path, self.num_bytes)
            return records

    def _records(self) -> list[Record]:
        data = self._path.read_bytes() if self._path.exists() else b""
        records, place = [], 0
        while place + _HEAD.size <= len(data):
            kind, seq_id, length, crc = _HEAD.unpack_from(data, place)
            record = Record(kind, seq_id, data[place + _HEAD.size : place + _HEAD.size + length])
            if len(record.body) < length or record.crc != crc:
                break
            records.append(record)
            place += _HEAD.size + length
        return records

    def append(self, record: Record) -> None:
        """Write a record and sync it to disk.

        Raises:
            StorageError: the record could not be written. The journal is as before.
        """
        with self._turn:
            try:
                with self._path.open("ab") as stream:
                    stream.write(record.encoded())
                    stream.flush()
                    os.fsync(stream.fileno())
                if not self.num_bytes:
                    sync(self._path.parent)
                self.num_bytes += len(record.encoded())
            except OSError as error:
                with suppress(OSError):
                    os.truncate(self._path, self.num_bytes)
                raise StorageError(f"{self._path}: a request could not be kept: {why_not_written(error)}") from error

    def rewrite(self, first: Iterable[Record], keep: Callable[[Record], bool]) -> None:
        """Replace the journal.

        Args:
            first: records at its beginning.
            keep: whether a record of the present journal follows.

        Raises:
            StorageError: the journal could not be written. It is as before.
        """
        with self._turn:
            kept = [record for record in self._records() if keep(record)]
            data = b"".join(record.encoded() for record in [*first, *kept])
            try:
                replace(self._path, data, 0o600)
            except OSError as error:
                raise StorageError(f"{self._path}: could not be written: {why_not_written(error)}") from error
            self.num_bytes = len(data)
