"""The daemon's Unix socket as a file: made private, replaced when dead, refused when alive, removed when ours."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

BACKLOG = 128
PROBE_SECONDS = 1.0  # how long a socket that neither accepts nor refuses is waited for
LOCK_SECONDS = 2.0


class ListenError(Exception):
    """The socket cannot be opened; the message says why, for a person."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that listens, and which file is its own."""

    socket: socket.socket
    path: str
    identity: tuple[int, int]  # device and inode of the file that was bound

    def remove(self) -> None:
        """Close, and remove the file unless another engine has put its own in its place."""
        self.socket.close()
        with contextlib.suppress(OSError):
            if _identity(os.lstat(self.path)) == self.identity:
                os.unlink(self.path)


def listen(path: str) -> Listener:
    """A listening socket at `path`, mode 0600. A dead socket file is replaced. Raises ListenError."""
    with _only_starter(path):
        _clear(path)
        try:
            return _bind(path)
        except OSError as error:
            raise ListenError(f"cannot listen on {path}: {error.strerror or error}") from error


def _bind(path: str) -> Listener:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)  # before bind: the file is never open to others, not even for a moment
    try:
        server.bind(path)
        identity = _identity(os.lstat(path))
        server.listen(BACKLOG)
    except OSError:
        server.close()
        raise
    finally:
        os.umask(mask)
    server.setblocking(False)
    return Listener(server, path, identity)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def _only_starter(path: str) -> Iterator[None]:
    """Hold a lock on the folder: of two engines started at once, one must see the other's live socket."""
    try:
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ListenError(f"cannot listen on {path}: {error.strerror}") from error
    try:
        _lock(folder)
        yield
    finally:
        os.close(folder)


def _lock(folder: int) -> None:
    """Take the lock, or go on without it: on a shared folder anybody could hold it for ever."""
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.02)


def _clear(path: str) -> None:
    """Remove a dead socket file. Raises ListenError if what is there must stay."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ListenError(f"cannot listen on {path}: {error.strerror}") from error
    if not stat.S_ISSOCK(mode):
        raise ListenError(f"{path} exists and is not a socket; remove it or choose another --socket")
    if _alive(path):
        raise ListenError(f"an engine is already listening on {path}; stop it or choose another --socket")
    try:
        os.unlink(path)
    except OSError as error:
        raise ListenError(f"cannot replace the dead socket {path}: {error.strerror}") from error


def _alive(path: str) -> bool:
    """True unless connecting is refused: a socket that is full or slow has somebody behind it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except PermissionError as error:
            raise ListenError(f"{path} belongs to somebody else; choose another --socket") from error
        except OSError:
            return True
        return True
