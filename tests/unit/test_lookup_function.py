"""The bare function that vLLM's lookups go to."""

from __future__ import annotations

import gc
import sys

import pytest
from kvoffload_rs import _core

ANSWERS = (object(), object(), object())


def make() -> _core.Manager:
    return _core.Manager(4, answers=ANSWERS)


def test_it_answers_as_the_method_does() -> None:
    manager = make()
    lookup = manager.lookup_function()
    request = manager.new_request()
    manager.prepare_store([b"written", b"ready"], request)
    manager.complete_store([b"ready"], request)
    for key in (b"absent", b"ready", b"written", b"", b"long" * 50):
        assert lookup(key, None) is manager.lookup(key) is lookup(key)
    assert [lookup(key) for key in (b"absent", b"ready", b"written")] == list(ANSWERS)


def test_it_keeps_its_manager_alive() -> None:
    lookup = make().lookup_function()
    gc.collect()
    assert lookup(b"key") is ANSWERS[0]


@pytest.mark.parametrize("arguments", [(), ("text",), (1, 2), (None,), (bytearray(b"key"),)])
def test_anything_but_bytes_is_a_type_error(arguments: tuple[object, ...]) -> None:
    lookup = make().lookup_function()
    with pytest.raises(TypeError, match="key"):
        lookup(*arguments)
    with pytest.raises(TypeError):
        lookup(key=b"key")


def test_answers_are_counted_references() -> None:
    lookup = make().lookup_function()
    before = sys.getrefcount(ANSWERS[0])
    for _ in range(1000):
        lookup(b"absent", None)
    after = sys.getrefcount(ANSWERS[0])
    assert after == before
