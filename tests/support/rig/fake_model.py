"""A stand-in for the forward pass that notices every wrong byte.

The "KV" of a token is a pattern made from all tokens up to it, the layer, the rank and the weights'
version. A step writes the pattern of the tokens it computes and first checks the pattern of every
token that attention would read, so a block that was lost, mixed up, loaded too late or stored from
reused memory fails the very step that would have used it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_MASK = (1 << 64) - 1
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
FIRST_TOKEN, LAST_TOKEN = 3, 900


class WrongBytes(AssertionError):
    """Attention would have read something else than what was computed."""


@dataclass
class Group:
    """One KV cache group: its layer names, and what of a prefix it attends to.

    ``window``: the last so many tokens. ``local``: those since the last multiple of it. Otherwise
    all. ``block_size``: tokens of its blocks, if they are not the engine's. ``latent``: MLA, whose
    KV is the same on all ranks. ``state``: Mamba with aligned states, where a block holds what is
    left of all tokens up to the last one that a step has computed.
    """

    layers: list[str]
    window: int | None = None
    local: int | None = None
    block_size: int | None = None
    latent: bool = False
    state: bool = False

    def first_read(self, position: int) -> int:
        """The first token that the one at ``position`` attends to."""
        if self.window is not None:
            return max(0, position + 1 - self.window)
        return 0 if self.local is None else position - position % self.local


@dataclass
class Tokens:
    """The tokens of one request as the workers know them, and the hash of each prefix."""

    values: list[int]
    chain: list[int] = field(default_factory=list)


class FakeModel:
    """Computes, checks and samples for all requests. Token positions and block numbers are vLLM's.

    ``pages[rank][i]`` is the int8 array ``(num_blocks, page_bytes)`` that layer i of every group
    shares, as vLLM overlays groups.
    """

    def __init__(self, groups: list[Group], block_size: int, pages: list[list[np.ndarray]]) -> None:
        self.groups = groups
        self.block_size = block_size
        self.pages = pages
        self.weights = 0
        self.requests: dict[str, Tokens] = {}
        self.rows_checked = 0

    def add(self, request_id: str, prompt: list[int]) -> None:
        """Take note of a new request's prompt."""
        self.requests[request_id] = Tokens(list(prompt))

    def change_weights(self) -> None:
        """Every KV computed so far is stale from now on."""
        self.weights += 1
        for tokens in self.requests.values():
            tokens.chain.clear()

    def forget_kv(self) -> None:
        """Lose everything that is in the device's blocks."""
        for rank in self.pages:
            for page in rank:
                page[:] = 0

    def truncate(self, request_id: str, length: int) -> None:
        """The engine dropped sampled tokens past ``length`` (a preempted request)."""
        tokens = self.requests[request_id]
        del tokens.values[length:]
        del tokens.chain[length:]

    def compute(
        self, rank: int, request_id: str, blocks: tuple[list[int], ...], computed: int, new: int
    ) -> None:
        """One rank's forward pass over one request: ``new`` tokens from ``computed`` on.

        ``blocks`` are the request's block numbers per group. Raises ``WrongBytes``.
        """
        tokens = self.requests[request_id]
        end = computed + new
        if end > len(tokens.values):
            raise AssertionError(f"{request_id}: token {end} computed before it was sampled")
        self._extend(tokens, end)
        for group, group_blocks in zip(self.groups, blocks, strict=True):
            if group.state:
                self._advance(rank, request_id, group, group_blocks, computed, end)
                continue
            first = group.first_read(computed)
            self._check(rank, request_id, group, group_blocks, first, computed)
            self._write(rank, request_id, group, group_blocks, computed, end)

    def expected(self, prompt: list[int], length: int) -> list[int]:
        """The first ``length`` tokens that a request with this prompt has in the end."""
        tokens = Tokens(list(prompt))
        while len(tokens.values) < length:
            self._extend(tokens, len(tokens.values))
            tokens.values.append(_token(tokens.chain[-1]))
        return tokens.values[:length]

    def sample(self, request_id: str, end: int) -> list[int]:
        """The token after the first ``end``, or nothing if that one is known already."""
        tokens = self.requests[request_id]
        if end < len(tokens.values):
            return []
        sampled = _token(tokens.chain[end - 1])
        tokens.values.append(sampled)
        return [sampled]

    def _extend(self, tokens: Tokens, end: int) -> None:
        state = tokens.chain[-1] if tokens.chain else 0x1234567 + self.weights
        for value in tokens.values[len(tokens.chain) : end]:
            state = (state ^ (value + 1)) * 0xD6E8FEB86659FD93 & _MASK
            state ^= state >> 29
            tokens.chain.append(state)

    def _pattern(
        self, tokens: Tokens, first: int, end: int, whose: str, row_bytes: int
    ) -> np.ndarray:
        seed = np.uint64(hash_of(whose))
        chain = np.array(tokens.chain[first:end], dtype=np.uint64) ^ seed
        words = np.arange(1, row_bytes // 8 + 1, dtype=np.uint64)
        mixed = (chain[:, None] + words[None, :]) * _SPREAD
        mixed ^= mixed >> np.uint64(31)
        return mixed.view(np.int8).reshape(end - first, row_bytes)

    def _rows(
        self, group: Group, blocks: list[int], first: int, end: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Index of tokens ``first..end`` in a page array seen as (block, token, bytes)."""
        positions = np.arange(first, end)
        size = group.block_size or self.block_size
        return np.asarray(blocks)[positions // size], positions % size

    def _by_token(self, group: Group, page: np.ndarray) -> np.ndarray:
        return page.reshape(page.shape[0], group.block_size or self.block_size, -1)

    def _check(
        self, rank: int, request_id: str, group: Group, blocks: list[int], first: int, end: int
    ) -> None:
        if first >= end:
            return
        tokens, rows = self.requests[request_id], self._rows(group, blocks, first, end)
        for layer, page in zip(group.layers, self.pages[rank], strict=True):
            view = self._by_token(group, page)
            expected = self._pattern(tokens, first, end, _whose(group, layer, rank), view.shape[2])
            wrong = np.flatnonzero((view[rows] != expected).any(axis=1))
            self.rows_checked += end - first
            if wrong.size:
                at = first + int(wrong[0])
                size = group.block_size or self.block_size
                raise WrongBytes(
                    f"{request_id}: {wrong.size} of {end - first} tokens read wrong bytes, the "
                    f"first at token {at} (layer {layer}, rank {rank}, block "
                    f"{blocks[at // size]}, weights {self.weights})"
                )

    def _advance(
        self, rank: int, request_id: str, group: Group, blocks: list[int], computed: int, end: int
    ) -> None:
        """Reads the state after the first ``computed`` tokens, and writes that after ``end``."""
        tokens, size = self.requests[request_id], group.block_size or self.block_size
        for layer, page in zip(group.layers, self.pages[rank], strict=True):
            row_bytes, whose = page.shape[1], _whose(group, layer, rank)
            if computed:
                block = blocks[(computed - 1) // size]
                state = self._pattern(tokens, computed - 1, computed, whose, row_bytes)
                self.rows_checked += 1
                if (page[block] != state[0]).any():
                    raise WrongBytes(
                        f"{request_id}: another state than that after {computed} tokens (layer "
                        f"{layer}, rank {rank}, block {block}, weights {self.weights})"
                    )
            page[blocks[(end - 1) // size]] = self._pattern(tokens, end - 1, end, whose, row_bytes)

    def _write(
        self, rank: int, request_id: str, group: Group, blocks: list[int], first: int, end: int
    ) -> None:
        tokens, rows = self.requests[request_id], self._rows(group, blocks, first, end)
        for layer, page in zip(group.layers, self.pages[rank], strict=True):
            view = self._by_token(group, page)
            whose = _whose(group, layer, rank)
            view[rows] = self._pattern(tokens, first, end, whose, view.shape[2])


def _whose(group: Group, layer: str, rank: int) -> str:
    """Name of what differs from other layers, and from other ranks unless they hold the same."""
    return layer if group.latent else f"{layer}/{rank}"


def _token(state: int) -> int:
    return FIRST_TOKEN + (state >> 7) % (LAST_TOKEN - FIRST_TOKEN)


def hash_of(text: str) -> int:
    """A fixed 64-bit hash of ``text`` (Python's own differs from run to run)."""
    state = 0xCBF29CE484222325
    for byte in text.encode():
        state = (state ^ byte) * 0x100000001B3 & _MASK
    return state
