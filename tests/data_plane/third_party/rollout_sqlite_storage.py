"""The storage: rows as blobs in a SQLite file. It knows nothing of data planes."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

_TABLES = """
    CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS partitions (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE IF NOT EXISTS rows (partition TEXT, key TEXT, value BLOB NOT NULL, PRIMARY KEY (partition, key));
"""


class Storage:
    """One file, one connection. Safe to share between threads."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.executescript(_TABLES)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def fact(self, name: str, table: str = "facts") -> str | None:
        found = self._db.execute(f"SELECT value FROM {table} WHERE name = ?", (name,)).fetchone()
        return found[0] if found else None

    def set_fact(self, name: str, value: str, table: str = "facts") -> None:
        self._db.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", (name, value))

    def keys(self, partition: str) -> list[str]:
        query = "SELECT key FROM rows WHERE partition = ? ORDER BY rowid"
        return [key for (key,) in self._db.execute(query, (partition,))]

    def get(self, partition: str, key: str) -> bytes | None:
        query = "SELECT value FROM rows WHERE partition = ? AND key = ?"
        found = self._db.execute(query, (partition, key)).fetchone()
        return found[0] if found else None

    def put(self, partition: str, key: str, value: bytes) -> None:
        query = "INSERT INTO rows VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = excluded.value"
        self._db.execute(query, (partition, key, value))

    def delete(self, partition: str, key: str) -> None:
        self._db.execute("DELETE FROM rows WHERE partition = ? AND key = ?", (partition, key))

    def copy_to(self, path: Path) -> None:
        with self._lock, closing(sqlite3.connect(path)) as copy:
            self._db.backup(copy)

    def copy_from(self, path: Path) -> None:
        with self._lock, closing(sqlite3.connect(path)) as copy:
            copy.backup(self._db)

    def close(self) -> None:
        with self._lock:
            self._db.close()
