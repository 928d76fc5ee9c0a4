"""The requests of the oracle: prompts that share prefixes, in one or several KV groups."""

from __future__ import annotations

import random
from collections.abc import Callable

from oracle_sides import Request, Setup
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

PROMPTS = 6


class Traffic:
    """Makes up requests over a few prompts, which come and go."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.setup, self.rng = setup, rng
        self.requests = self.hashes = 0
        self.prompts: list[list[bytes]] = []
        for _ in range(PROMPTS):
            self._renew_prompt()

    def new_request(self, resets: int) -> Request:
        """A request for a part of some prompt, begun after so many resets."""
        rng = self.rng
        if rng.random() < 0.4:
            self._renew_prompt()
        prompt = rng.choice(self.prompts)
        length = rng.randint(1, len(prompt))
        groups = [
            # Groups may cover more or fewer tokens per chunk, so their chunks interleave.
            [make_offload_key(h, group) for h in prompt[: max(1, length // (1 + order % 2))]]
            for order, group in enumerate(self.setup.groups)
        ]
        name = f"r{self.requests}"
        request = Request(self.requests, ReqContext(name), ReqContext(name), groups, resets)
        self.requests += 1
        mood = rng.random()
        if mood < 0.6:  # like the real scheduler: the last token of every chunk
            self.set_positions(request, lambda order, i: (i + 1) * 16 * (1 + order % 2), 1.0)
        elif mood < 0.7:  # some chunks have none
            self.set_positions(request, lambda order, i: (i + 1) * 16, 0.7)
        elif mood < 0.8:  # any order, with ties
            self.set_positions(request, lambda order, i: rng.randrange(6), 1.0)
        return request

    def set_positions(
        self, request: Request, position: Callable[[int, int], int], share: float
    ) -> None:
        """Tell both contexts where chunks end, for about this share of them."""
        for order, keys in enumerate(request.groups):
            for index, key in enumerate(keys):
                if self.rng.random() < share:
                    end = position(order, index)
                    request.ours.set_offload_key_position(key, end)
                    request.theirs.set_offload_key_position(key, end)

    def some_keys(self, request: Request) -> list[bytes]:
        """Part of a request's keys: a window of each group, now and then in another order."""
        rng, keys = self.rng, []
        for group in request.groups:
            start = rng.randrange(len(group)) if rng.random() < 0.5 else 0
            keys += group[start : rng.randint(start, len(group))]
        mood = rng.random()
        if mood < 0.1:
            rng.shuffle(keys)
        elif mood < 0.2:
            keys = rng.sample(keys, rng.randint(0, len(keys)))
        return keys

    def _renew_prompt(self) -> None:
        """Replace one prompt by a new one, which often shares a prefix with another."""
        prompt: list[bytes] = []
        if self.prompts and self.rng.random() < 0.6:
            other = self.rng.choice(self.prompts)
            prompt = other[: self.rng.randint(0, len(other))]
        while len(prompt) < self.setup.max_chunks:
            prompt.append(self._new_hash())
        if len(self.prompts) >= PROMPTS:
            self.prompts[self.rng.randrange(PROMPTS)] = prompt
        else:
            self.prompts.append(prompt)

    def _new_hash(self) -> bytes:
        """A new block hash. Serial numbers keep keys distinct whatever their length."""
        self.hashes += 1
        size = self.setup.hash_bytes[self.hashes % len(self.setup.hash_bytes)]
        serial = self.hashes.to_bytes(4, "big")
        return serial if size <= 4 else serial + self.rng.randbytes(size - 4)
