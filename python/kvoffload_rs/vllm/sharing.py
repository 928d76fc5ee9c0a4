"""One host region for all ranks, where they all hold the same KV: replicated MLA.

The first rank has it and stores to it; the others map the same memory and only load. What they map
is a descriptor, which goes from process to process over a Unix socket in the abstract namespace: no
file is made, and nothing is left of it when a process is killed. The socket's name is made from the
user, the engine's id and the process that started the ranks, so that two engines never meet; both
ends see whether the other belongs to the same user and to the same process namespace.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass, field

from kvoffload_rs.errors import CapacityError, ConfigError

#: How long a rank waits for the first one's region. All ranks get there at about the same time.
DEADLINE_S = 60.0

_PAUSE_S = 0.02
_ANSWER_S = 5.0
_LONGEST = 4096
_OFF = "Or set share_replicated_kv to false: then every rank has a region of its own."


@dataclass(frozen=True)
class Sharing:
    """Who shares a region.

    Attributes:
        engine_id: id of the engine.
        rank: this rank; 0 has the region.
        ranks: all of them.
        parent: the process that started the ranks.
    """

    engine_id: str
    rank: int
    ranks: int
    parent: int = field(default_factory=os.getppid)

    @property
    def reads_only(self) -> bool:
        """Another rank stores for this one."""
        return self.rank != 0

    @property
    def address(self) -> str:
        """Name of the socket; it begins with a zero, so it names no file."""
        name = f"{os.getuid()}/{self.parent}/{self.engine_id}"
        return f"\0kvoffload-rs/{hashlib.sha256(name.encode()).hexdigest()}"

    def join(self, shape: str, deadline_s: float = DEADLINE_S) -> int:
        """Gets the descriptor of the first rank's region, which the caller closes.

        Args:
            shape: what the region looks like here.
            deadline_s: how long to wait for it.

        Raises:
            CapacityError: it looks different there.
            ConfigError: it did not come in time.
        """
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                found, descriptor = self._receive()
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"rank {self.rank} did not get the region of rank 0 within "
                        f"{deadline_s:g} s: {error}",
                        field="share_replicated_kv",
                        hint=f"Look for an error of rank 0. {_OFF}",
                    ) from error
                time.sleep(_PAUSE_S)
                continue
            if found == _message(shape):
                return descriptor
            os.close(descriptor)
            raise CapacityError(
                f"the region of rank 0 has {found[32:].decode(errors='replace')}, "
                f"rank {self.rank} has {shape[:300]}",
                field="share_replicated_kv",
                hint=f"The ranks have different KV caches: report it. {_OFF}",
            )

    def _receive(self) -> tuple[bytes, int]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(self.address)
            if not _is_ours(connection):
                raise PermissionError("its socket belongs to somebody else")
            connection.sendall(struct.pack("i", self.rank))
            flags = socket.MSG_CMSG_CLOEXEC
            message, descriptors, _, _ = socket.recv_fds(connection, _LONGEST, 1, flags)
            if len(descriptors) != 1:
                raise ConnectionError("it was not sent")
            with contextlib.suppress(OSError):  # it has been received all the same
                connection.sendall(b"k")
            return message, descriptors[0]


class Offer:
    """Gives the region's descriptor to every other rank, once each, on a thread.

    Args:
        sharing: who shares it.
        descriptor: of the region; closed when all have it, or by `close`.
        shape: what the region looks like.

    Raises:
        ConfigError: another process offers a region for an engine of that name.
    """

    def __init__(self, sharing: Sharing, descriptor: int, shape: str) -> None:
        self._descriptor = descriptor
        self._message = _message(shape)
        self._missing = set(range(1, sharing.ranks))
        self._closing = threading.Event()
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._listener.bind(sharing.address)
                self._listener.listen(sharing.ranks)
            except OSError:
                self._listener.close()
                raise
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(
                f"the region of engine {sharing.engine_id!r} cannot be offered: {error}",
                field="engine_id",
                value=sharing.engine_id,
                hint=f"Give every engine its own kv_transfer_config.engine_id. {_OFF}",
            ) from error
        self._listener.settimeout(0.2)
        self._thread = threading.Thread(target=self._serve, name="kvoffload-share", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it. What others have joined stays theirs."""
        self._closing.set()
        self._thread.join()

    def _serve(self) -> None:
        try:
            with self._listener:
                while self._missing and not self._closing.is_set():
                    # Who does not get it comes again, if it still wants it.
                    with contextlib.suppress(OSError, struct.error):
                        connection, _ = self._listener.accept()
                        with connection:
                            self._give(connection)
        finally:
            os.close(self._descriptor)

    def _give(self, connection: socket.socket) -> None:
        if not _is_ours(connection):
            return
        connection.settimeout(_ANSWER_S)
        (rank,) = struct.unpack("i", connection.recv(4))
        if rank not in self._missing:
            return
        socket.send_fds(connection, [self._message], [self._descriptor])
        if connection.recv(1) == b"k":
            self._missing.discard(rank)


def _message(shape: str) -> bytes:
    """A shape's digest, and its beginning for people."""
    return hashlib.sha256(shape.encode()).digest() + shape[:300].encode()


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user, and to no other namespace."""
    size = struct.calcsize("3i")
    process, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return bool(process != 0 and user == os.getuid())
