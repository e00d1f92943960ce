"""The server's socket, a port or a UNIX socket, opened before the model is loaded; and its API keys."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thermocline.errors import IOFailure, Unsupported, UsageError

try:
    import resource
except ImportError:  # Windows counts sockets elsewhere
    resource = None  # type: ignore[assignment]

_BACKLOG = 1024
_OTHER_FILES = 128  # open files besides connections; an ample estimate
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Listener:
    """An open socket. `host` is what the user asked for, or None for a UNIX socket."""

    socket: socket.socket
    host: str | None
    is_loopback: bool
    path: Path | None = None
    has_keys: bool = True
    _inode: int = field(default=0, repr=False)

    @property
    def port(self) -> int:
        port: int = 0 if self.path is not None else self.socket.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return (
            f"unix:{self.path}" if self.path is not None else f"http://{_in_url(self.host or '')}:{self.port}"
        )

    @property
    def takes_addresses(self) -> bool:
        """Tell whether other machines reach it without a key, by any of its addresses or a forwarded port."""
        return self.path is None and not self.is_loopback and not self.has_keys

    def host_names(self, more: Iterable[str]) -> set[str] | None:
        """Return the allowed Host headers; None allows any.

        On loopback a name needs the server's port. Any Host is safe if a key is needed, since an attacker's
        page has no key, and on a UNIX socket, since no browser reaches it.
        """
        names = {*_LOOPBACK_NAMES, _in_url(self.host or ""), *more}
        if self.takes_addresses:
            own = socket.gethostname()
            return names | {own, f"{own.partition('.')[0]}.local"}
        return names | {f"{name}:{self.port}" for name in names} if self.is_loopback else None

    def close(self) -> None:
        self.socket.close()
        with contextlib.suppress(OSError):
            if self.path is not None and self.path.stat().st_ino == self._inode:  # not another server's
                self.path.unlink()


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def listen(host: str, port: int, *, has_keys: bool, insecure: bool = False) -> Listener:
    """Open a port (0: any free one). An address that other machines reach needs keys, or `insecure`."""
    bare = host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UsageError(f"--host {host}: no such host; give a name or address of this machine") from None
    family, _, _, _, address = min(found, key=lambda f: f[0] != socket.AF_INET)
    is_loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    if not (is_loopback or has_keys or insecure):
        raise UsageError(
            f"--host {host} can be reached by other machines, and there is no key: "
            "give one with --api-key-file FILE, or add --insecure"
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # on Windows this option lets two servers share a port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as e:
        sock.close()
        if e.errno == errno.EADDRINUSE:
            raise IOFailure(f"{host}:{port} is in use already; choose another --port") from None
        raise IOFailure(f"{host}:{port} cannot be listened on: {e.strerror}") from None
    sock.setblocking(False)
    return Listener(sock, bare, is_loopback, has_keys=has_keys)


def listen_unix(path: Path) -> Listener:
    """Open a UNIX socket for this user alone, in place of one that a dead server left."""
    if not hasattr(socket, "AF_UNIX"):
        raise Unsupported("this system has no UNIX sockets; use --host and --port")
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # the socket is never open to others, not even for a moment
    try:
        sock.bind(str(path))
        sock.listen(_BACKLOG)
    except OSError as e:
        sock.close()
        raise IOFailure(f"{path} cannot be listened on: {e.strerror or e}") from None
    finally:
        os.umask(before)
    sock.setblocking(False)
    return Listener(sock, None, False, path, _inode=path.stat().st_ino)


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as e:
        raise IOFailure(f"{path} cannot be listened on: {e.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise IOFailure(f"{path} exists and is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as e:
            raise IOFailure(f"{path} cannot be listened on: {e.strerror}") from None
    raise IOFailure(f"{path} is in use already; choose another path")


def api_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Return the given keys and a file's lines. A file without a key is an error: it would need no key."""
    keys = list(given)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError as e:
            raise IOFailure(f"{file}: the API keys cannot be read: {e.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"{file}: API keys have to be ASCII, one a line") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise UsageError(f"{file}: has no API key; put one on each line")
        keys += found
    for n, key in enumerate(keys, 1):
        if not (key.isascii() and key.isprintable() and key == key.strip() and key):
            raise UsageError(f"API key {n} is empty or has a character that no header may have")
    return tuple(keys)


def allow_files(connections: int) -> int:
    """Raise this process's limit of open files to what so many connections need.

    Return how many connections the new limit allows, so that a file is always left for everything else.
    """
    if resource is None:
        return connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = connections + _OTHER_FILES
    most = need if hard == resource.RLIM_INFINITY else min(need, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return min(connections, max(1, most - min(_OTHER_FILES, most // 2)))
