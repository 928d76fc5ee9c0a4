"""Workloads: deterministic, within the model's limits, and large enough to need offloading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvoffload_rs.cli import model, workload
from kvoffload_rs.cli.workload import BLOCK_TOKENS, TRACE_TOKENS, Turn, Workload
from kvoffload_rs.errors import ConfigError


def write_trace(path: Path, prompts: list[list[int]]) -> Path:
    entries = [
        {"timestamp": number, "input_length": 512 * len(ids), "hash_ids": ids}
        for number, ids in enumerate(prompts)
    ]
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return path


def chat(users: int = 12, turns: int = 8, limit: int | None = None, seed: int = 0) -> Workload:
    return workload.chat(users, turns, limit=limit, max_tokens=16, seed=seed)


def trace(path: Path, limit: int = 300) -> Workload:
    return workload.from_trace(path, limit=limit, max_tokens=16, seed=0)


def tokens_of(work: Workload) -> list[list[int]]:
    return [turn.tokens for turn in work.requests]


def test_the_chat_follows_from_the_seed() -> None:
    assert tokens_of(chat(seed=3)) == tokens_of(chat(seed=3))
    assert tokens_of(chat(seed=3)) != tokens_of(chat(seed=4))


def test_users_take_turns_and_share_a_system_prompt() -> None:
    work = chat(users=12, turns=3)
    assert [turn.session for turn in work.requests] == 3 * list(range(12))
    first = work.requests[:12]
    assert len({tuple(turn.tokens[:96]) for turn in first}) == 1
    assert len({tuple(turn.tokens[96:]) for turn in first}) == 12
    assert not work.notes


def test_tokens_are_the_models() -> None:
    for tokens in tokens_of(chat()):
        assert min(tokens) >= model.FIRST_TOKEN
        assert max(tokens) < model.VOCAB_SIZE


def test_sizes_follow_from_the_longest_session() -> None:
    requests = [Turn(0, [5] * 40), Turn(1, [5] * 100), Turn(0, [5] * 30)]
    work = Workload(requests, max_tokens=10)
    assert work.longest == 110
    assert work.max_model_len == 128
    assert work.engine_blocks == 2 * 4 + 1


def test_returning_requests_counts_what_the_engine_dropped() -> None:
    def prompt(number: int) -> Turn:
        return Turn(number, [number % 3] * 64)

    # Two sessions fit; the third pushes the first out, which then comes back, and so on.
    work = Workload([prompt(number) for number in range(6)], max_tokens=1)
    assert work.engine_blocks == 7
    assert workload.returning_requests(work) == 0  # 3 prompts of 2 blocks: all stay
    work = Workload([Turn(n, [n % 4] * 64) for n in range(8)], max_tokens=1)
    assert workload.returning_requests(work) == 4
    same = Workload([Turn(n, [1] * 64) for n in range(8)], max_tokens=1)
    assert workload.returning_requests(same) == 0


@pytest.mark.parametrize(
    ("users", "turns", "limit"),
    [(12, 8, None), (12, 8, 6), (3, 8, None), (2, 8, None), (99, 1, 99)],
)
def test_a_chat_always_has_something_to_offload(users: int, turns: int, limit: int | None) -> None:
    work = chat(users, turns, limit)
    assert workload.returning_requests(work) > 0
    assert ("repeated_requests" in work.facts) == bool(work.notes)


def test_a_chat_that_fits_the_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fit the engine's own cache of .* Serve more requests"):
        chat(users=1)


def test_a_chat_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the model has 8192 positions\. Use fewer --turns"):
        chat(turns=200)


def test_equal_ids_become_equal_tokens_wherever_they_occur(tmp_path: Path) -> None:
    prompts = [[1, 2, 3, number] for number in range(100, 140)] + [[9, 2, 7]]
    work = trace(write_trace(tmp_path / "t", prompts))
    tokens = tokens_of(work)
    assert all(len(prompt) == 4 * BLOCK_TOKENS for prompt in tokens[:40])
    assert len({tuple(prompt[: 3 * BLOCK_TOKENS]) for prompt in tokens[:40]}) == 1
    assert len({tuple(prompt[3 * BLOCK_TOKENS :]) for prompt in tokens[:40]}) == 40
    second = slice(BLOCK_TOKENS, 2 * BLOCK_TOKENS)
    assert tokens[40][second] == tokens[0][second]
    assert tokens[0] == [t for block in prompts[0] for t in workload.id_tokens(block, 0, 32)]


@pytest.mark.parametrize("count", [1, 8, 32])
def test_id_tokens_depend_on_id_and_seed_only(count: int) -> None:
    ids = (0, 1, -1, 2**63)
    runs = [tuple(workload.id_tokens(i, seed, count)) for i in ids for seed in (0, 1)]
    assert all(len(run) == count for run in runs)
    assert all(model.FIRST_TOKEN <= token < model.VOCAB_SIZE for run in runs for token in run)
    assert runs[0] == tuple(workload.id_tokens(0, 0, count))
    if count > 1:
        assert len(set(runs)) == len(runs)


@pytest.mark.parametrize(("length", "run"), [(16, 32), (17, 16), (60, 8), (512, 1), (900, 1)])
def test_a_run_shrinks_until_the_median_prompt_fits(tmp_path: Path, length: int, run: int) -> None:
    prompts = [list(range(1000 * n, 1000 * n + length)) for n in range(9)]
    work = trace(write_trace(tmp_path / "t", prompts))
    assert work.facts["tokens_per_id"] == run
    assert all(len(tokens) == min(length * run, TRACE_TOKENS) for tokens in tokens_of(work))
    assert work.facts["prompts_cut"] == (9 if length > 512 else 0)


def test_long_prompts_keep_their_leading_ids_and_it_is_said(tmp_path: Path) -> None:
    prompts = [[n] for n in range(50)] + [list(range(1000, 1020))]
    work = trace(write_trace(tmp_path / "t", prompts))
    assert work.facts["prompts_cut"] == 1
    assert len(work.requests[50].tokens) == TRACE_TOKENS
    assert work.requests[50].tokens[:BLOCK_TOKENS] == workload.id_tokens(1000, 0, BLOCK_TOKENS)
    assert "1 of 51 prompts are longer" in " ".join(work.notes)
    assert "keep their first 16 block ids" in " ".join(work.notes)


def test_a_trace_that_never_returns_is_repeated(tmp_path: Path) -> None:
    prompts = [[100 * n + i for i in range(10)] for n in range(100)]
    work = trace(write_trace(tmp_path / "t", prompts))
    assert work.facts["repeated_requests"] == 64
    assert tokens_of(work)[100:] == tokens_of(work)[36:100]
    sessions = [turn.session for turn in work.requests]
    assert len(set(sessions)) == len(sessions)
    assert "64 requests are sent once more" in " ".join(work.notes)


def test_a_trace_of_one_user_is_played_by_several(tmp_path: Path) -> None:
    prompts = [list(range(length)) for length in range(1, 17)]
    work = trace(write_trace(tmp_path / "t", prompts))
    assert work.facts["users"] == 4
    assert workload.returning_requests(work) >= 5
    assert len({tuple(tokens) for tokens in tokens_of(work)[:4]}) == 4
    assert "4 users" in " ".join(work.notes)


def test_one_request_is_enough(tmp_path: Path) -> None:
    work = trace(write_trace(tmp_path / "t", [[1, 2, 3]]))
    assert workload.returning_requests(work) > 0


def test_the_limit_counts_requests_of_the_trace(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t", [[n % 20, n, n + 1] for n in range(100)])
    assert trace(path, limit=60).facts["trace_requests"] == 60
    assert trace(path, limit=60).facts["trace_tokens"] == 60 * 3 * 512
