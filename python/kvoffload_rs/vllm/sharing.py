"""One host region for all ranks, where they all hold the same KV: replicated MLA.

The first rank has it and stores to it; the others map the same memory and only load. What they map
is a descriptor, which goes from process to process over a Unix socket in the abstract namespace: no
file is made, nothing is left of it when a process is killed, and both ends see whether the other
belongs to the same user.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from dataclasses import dataclass

from kvoffload_rs.errors import CapacityError, ConfigError

#: How long a rank waits for the first one's region. All ranks get there at about the same time.
DEADLINE_S = 60.0

_PAUSE_S = 0.02
_LONGEST_SHAPE = 4096
_OFF = "Or set share_replicated_kv to false: then every rank has a region of its own."


@dataclass(frozen=True)
class Sharing:
    """Who shares a region.

    Attributes:
        engine_id: id of the engine.
        rank: this rank; 0 has the region.
        ranks: all of them.
    """

    engine_id: str
    rank: int
    ranks: int

    @property
    def reads_only(self) -> bool:
        """Another rank stores for this one."""
        return self.rank != 0

    @property
    def address(self) -> str:
        """Name of the socket; it begins with a zero, so it names no file."""
        return f"\0kvoffload-rs/{os.getuid()}/{self.engine_id}"

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
                found, descriptor = _receive(self.address, max(deadline - time.monotonic(), 0.1))
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
            if found == shape:
                return descriptor
            os.close(descriptor)
            raise CapacityError(
                f"the region of rank 0 has {found}, rank {self.rank} has {shape}",
                field="share_replicated_kv",
                hint=f"The ranks have different KV caches: report it. {_OFF}",
            )


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
        self._message = shape.encode()
        self._left = sharing.ranks - 1
        self._closing = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(sharing.address)
        except OSError as error:
            self._listener.close()
            os.close(descriptor)
            raise ConfigError(
                f"the region of engine {sharing.engine_id!r} cannot be offered: {error}",
                field="engine_id",
                value=sharing.engine_id,
                hint=f"Give every engine its own kv_transfer_config.engine_id. {_OFF}",
            ) from error
        self._listener.listen(sharing.ranks)
        self._listener.settimeout(0.2)
        self._thread = threading.Thread(target=self._serve, name="kvoffload-share", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it. What others have joined stays theirs."""
        self._closing.set()
        self._thread.join()

    def _serve(self) -> None:
        with self._listener:
            while self._left > 0 and not self._closing.is_set():
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:
                    break
                with connection:
                    if _user(connection) != os.getuid():
                        continue
                    try:
                        connection.settimeout(5.0)
                        socket.send_fds(connection, [self._message], [self._descriptor])
                        self._left -= 1
                    except OSError:
                        continue  # it comes again, if it still wants it
        os.close(self._descriptor)


def _receive(address: str, timeout_s: float) -> tuple[str, int]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(address)
        if _user(connection) != os.getuid():
            raise PermissionError("its socket belongs to another user")
        message, descriptors, _, _ = socket.recv_fds(connection, _LONGEST_SHAPE, 1)
        if len(descriptors) != 1:
            raise ConnectionError("it was not sent")
        os.set_inheritable(descriptors[0], False)
        return message.decode(), descriptors[0]


def _user(connection: socket.socket) -> int:
    """User of the process at the other end."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return int(user)
