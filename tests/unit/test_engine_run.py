"""How the demo's engine process serves a workload, with a stand-in for vLLM's engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvoffload_rs.cli.engine_run import counters, serve


class Engine:
    """Answers each prompt with its length, one token a step; later requests finish first."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.running: dict[str, list[int]] = {}
        self.prompts: list[list[int]] = []
        self.most_running = 0

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self.prompts.append(prompt["prompt_token_ids"])
        self.running[name] = []
        self.most_running = max(self.most_running, len(self.running))

    def step(self) -> list[Any]:
        name = next(reversed(self.running))
        answer = self.running[name]
        answer.append(len(self.prompts[int(name)]))
        finished = len(answer) == self.tokens
        if finished:
            del self.running[name]
        return [
            SimpleNamespace(
                request_id=name,
                finished=finished,
                outputs=[SimpleNamespace(token_ids=list(answer))],
            )
        ]


def job(sessions: list[int], answers: list[list[int]] | None = None, at_once: int = 4) -> Any:
    requests = [{"session": session, "tokens": [session] * 3} for session in sessions]
    return {"requests": requests, "answers": answers, "in_flight": at_once, "max_tokens": 2}


def test_a_prompt_is_the_history_with_the_engines_own_answers() -> None:
    engine, events = Engine(tokens=2), []
    result = serve(engine, job([0, 1, 0]), None, events.append)
    assert engine.prompts == [[0, 0, 0], [1, 1, 1], [0, 0, 0, 3, 3, 0, 0, 0]]
    assert result["tokens"] == [[3, 3], [3, 3], [8, 8]]
    assert result["prompt_tokens"] == [3, 3, 8]
    assert all(seconds > 0 for seconds in result["first_token_s"])
    assert [event["done"] for event in events] == [1, 2, 3]


def test_recorded_answers_replace_the_engines_own_in_the_history() -> None:
    engine = Engine(tokens=2)
    result = serve(engine, job([0, 0], answers=[[70, 71], [72, 73]]), None, lambda event: None)
    assert engine.prompts[1] == [0, 0, 0, 70, 71, 0, 0, 0]
    assert result["tokens"] == [[3, 3], [8, 8]]


def test_no_more_than_allowed_run_at_once() -> None:
    engine = Engine(tokens=2)
    serve(engine, job(list(range(10)), at_once=3), None, lambda event: None)
    assert engine.most_running == 3


def test_turns_of_a_session_wait_for_each_other_and_keep_the_order() -> None:
    engine = Engine(tokens=2)
    serve(engine, job([0, 0, 1]), None, lambda event: None)
    assert [prompt[-1] for prompt in engine.prompts] == [0, 0, 1]
    assert engine.most_running == 2


def test_counters_are_summed_and_sources_kept_apart() -> None:
    def metric(name: str, value: float | None, **labels: str) -> Any:
        values = {} if value is None else {"value": value}
        return SimpleNamespace(name=name, labels=labels, **values)

    assert counters(
        [
            metric("hits", 1, engine="0"),
            metric("hits", 2, engine="1"),
            metric("tokens", 3, source="host"),
            metric("tokens", 4, source="device"),
            metric("histogram", None),
        ]
    ) == {"hits": 3, "tokens{host}": 3, "tokens{device}": 4}
