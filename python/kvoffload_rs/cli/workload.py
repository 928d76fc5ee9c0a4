"""What the demo serves: a built-in chat with many users, or a trace scaled to the tiny model.

Both are lists of turns. A turn adds tokens to the history of its session; the prompt is the whole
history, and the answer joins it. Everything follows from the seed.
"""

from __future__ import annotations

import random
import statistics
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

from kvoffload_rs.cli import model
from kvoffload_rs.cli.trace import read_trace
from kvoffload_rs.errors import ConfigError

BLOCK_TOKENS = 32
"""Tokens of one block of the engine (vLLM's CPU attention needs a multiple of 32)."""

TRACE_TOKENS = 512
"""Tokens that a prompt of a trace may have; longer prompts keep their leading blocks."""

_SYSTEM_TOKENS = 96
_TURN_TOKENS = (48, 144)
_ENOUGH_RETURNING = 5
_REPEATED = 64
_TRACE_USERS = 4


@dataclass(frozen=True)
class Turn:
    """One request."""

    session: int
    tokens: list[int]
    """What this turn adds to the session's history."""


@dataclass(frozen=True)
class Workload:
    """Requests in the order they are sent, and the sizes the engine needs for them."""

    requests: list[Turn]
    max_tokens: int
    """Tokens of every answer."""
    facts: dict[str, Any] = field(default_factory=dict)
    """For the report: where the requests come from and how they were scaled."""
    notes: list[str] = field(default_factory=list)
    """The same in sentences, where the reader must know."""
    sessions_in_cache: int = 2
    """How many of the longest sessions the engine's own cache holds."""

    @property
    def longest(self) -> int:
        """Tokens of the longest session: the last prompt and its answer."""
        tokens: dict[int, int] = defaultdict(int)
        for turn in self.requests:
            tokens[turn.session] += len(turn.tokens) + self.max_tokens
        return max(tokens.values())

    @property
    def max_model_len(self) -> int:
        """The longest session, rounded up to whole blocks."""
        return -(-self.longest // BLOCK_TOKENS) * BLOCK_TOKENS

    @property
    def engine_blocks(self) -> int:
        """Blocks of the engine's own cache, with the one that vLLM keeps for itself."""
        return self.sessions_in_cache * self.max_model_len // BLOCK_TOKENS + 1


def chat(users: int, turns: int, *, limit: int | None, max_tokens: int, seed: int) -> Workload:
    """A chat: every user sends a first message, then every user a second one, and so on.

    By the time a user comes back, the others have pushed that user's blocks out of the engine's
    cache. All share one system prompt. ``limit`` keeps only the first so many requests.
    Raises ConfigError if the chat is too long for the model or too small to need offloading.
    """
    rng = random.Random(seed)
    system = _random_tokens(rng, _SYSTEM_TOKENS)
    requests = [
        Turn(user, (system if turn == 0 else []) + _random_tokens(rng, rng.randint(*_TURN_TOKENS)))
        for turn in range(turns)
        for user in range(users)
    ][:limit]
    work = Workload(requests, max_tokens, {"kind": "chat", "users": users, "turns": turns})
    _fitting(work)
    repeated = _repeated(work)
    return _enough([work, repeated, replace(repeated, sessions_in_cache=1)])


def from_trace(path: Path, *, limit: int, max_tokens: int, seed: int) -> Workload:
    """The first ``limit`` requests of a trace, each block id replaced by a run of tokens.

    Requests are sent in the order of the file. Equal ids become equal tokens, so that the engine
    finds the prefixes which the trace shares. The run is one engine block long, or a half, a
    quarter and so on until half of the prompts are served whole or one token is left.
    Where the engine's cache alone would do, the workload grows: the last requests are sent once
    more, or several users, each with tokens of its own, play the trace at the same time.
    Raises ConfigError if the file is no trace.
    """
    trace = read_trace(path, limit)
    median = statistics.median(len(entry.hash_ids) for entry in trace)
    run = BLOCK_TOKENS
    while run > 1 and median * run > TRACE_TOKENS:
        run //= 2
    most = TRACE_TOKENS // run
    cut = sum(len(entry.hash_ids) > most for entry in trace)
    notes = [
        f"trace {path.name}: its first {len(trace)} request{_s(len(trace))}, in the order of the "
        f"file; each block id becomes {run} token{_s(run)}"
    ]
    if cut:
        notes.append(
            f"{cut} of {len(trace)} prompts are longer than {TRACE_TOKENS} tokens even so "
            f"and keep their first {most} block ids"
        )

    def played_by(users: int) -> Workload:
        requests = []
        for number, entry in enumerate(trace):
            for user in range(users):
                runs = (id_tokens(block, seed + user, run) for block in entry.hash_ids[:most])
                requests.append(Turn(users * number + user, list(chain.from_iterable(runs))))
        facts = {
            "kind": "trace",
            "file": path.name,
            "users": users,
            "trace_requests": len(trace),
            "trace_tokens": sum(entry.input_length for entry in trace),
            "tokens_per_id": run,
            "prompts_cut": cut,
        }
        many = f"{users} users with tokens of their own play the trace at the same time"
        return _fitting(
            Workload(requests, max_tokens, facts, notes + ([many] if users > 1 else []))
        )

    def candidates() -> Iterator[Workload]:
        for users in (1, _TRACE_USERS):
            work = played_by(users)
            yield work
            yield _repeated(work)

    return _enough(candidates())


def id_tokens(block_id: int, seed: int, count: int) -> list[int]:
    """The tokens of a trace's block: the same for the same id and seed, wherever it occurs.

    ``count`` is at most :data:`BLOCK_TOKENS`.
    """
    digest = blake2b(f"{seed}:{block_id}".encode(), digest_size=2 * count).digest()
    span = model.VOCAB_SIZE - model.FIRST_TOKEN
    return [
        model.FIRST_TOKEN + int.from_bytes(digest[at : at + 2], "little") % span
        for at in range(0, len(digest), 2)
    ]


def returning_requests(work: Workload) -> int:
    """How many requests find a block that was computed before but is no longer in the engine.

    An estimate: one request at a time, and a least-recently-used cache of ``engine_blocks``.
    """
    # One block is reserved and never caches anything.
    capacity = work.engine_blocks - 1
    cache: OrderedDict[int, None] = OrderedDict()
    computed: set[int] = set()
    returning = 0
    for blocks in _prompt_blocks(work):
        found = 0
        while found < len(blocks) and blocks[found] in cache:
            found += 1
        returning += found < len(blocks) and blocks[found] in computed
        computed.update(blocks)
        # Like vLLM: a request's last blocks are the first to go.
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return returning


def _prompt_blocks(work: Workload) -> Iterator[list[int]]:
    """Hashes of the whole blocks of each prompt, each covering everything before it."""
    histories: dict[int, list[int]] = defaultdict(list)
    for turn in work.requests:
        history = histories[turn.session]
        history += turn.tokens
        hashes, before = [], 0
        for at in range(0, len(history) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            before = hash((before, *history[at : at + BLOCK_TOKENS]))
            hashes.append(before)
        yield hashes
        # The answer is not known yet, but it is the session's own.
        history += [-1 - turn.session] * work.max_tokens


def _fitting(work: Workload) -> Workload:
    if work.max_model_len <= model.MAX_POSITIONS:
        return work
    raise ConfigError(
        f"a session grows to {work.longest} tokens, and the model has {model.MAX_POSITIONS} "
        f"positions",
        field="max_tokens",
        value=work.max_tokens,
        hint="Use fewer --turns or a smaller --max-tokens.",
    )


def _enough(candidates: Iterable[Workload]) -> Workload:
    """The first workload in which enough comes back after the engine dropped it, or the last one.

    Without that, there is nothing for offloading to do and nothing in which the control could
    differ.
    """
    for work in candidates:
        returning = returning_requests(work)
        if returning >= _ENOUGH_RETURNING:
            return work
    if returning > 0:
        return work
    raise ConfigError(
        f"all blocks of these {len(work.requests)} requests fit the engine's own cache of "
        f"{work.engine_blocks} blocks, so nothing would come back from the host pool",
        field="requests",
        value=len(work.requests),
        hint="Serve more requests or more users.",
    )


def _repeated(work: Workload) -> Workload:
    """The workload, and then its last sessions once more."""
    last = {turn.session for turn in work.requests[-_REPEATED:]}
    again = 1 + max(turn.session for turn in work.requests)
    repeated = [
        Turn(again + turn.session, turn.tokens) for turn in work.requests if turn.session in last
    ]
    note = (
        f"hardly any block comes back after the engine dropped it, "
        f"so the last {len(repeated)} requests are sent once more"
    )
    return replace(
        work,
        requests=work.requests + repeated,
        facts={**work.facts, "repeated_requests": len(repeated)},
        notes=[*work.notes, note],
    )


def _random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(model.FIRST_TOKEN, model.VOCAB_SIZE) for _ in range(count)]


def _s(count: int) -> str:
    return "" if count == 1 else "s"
