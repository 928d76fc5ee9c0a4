"""Settings: what is read, what is refused, and what the refusal says."""

from __future__ import annotations

import pickle

import pytest
from kvoffload_rs import errors
from kvoffload_rs.config import (
    Settings,
    check_keys,
    edit_distance,
    near_miss,
    plan_capacity,
)
from kvoffload_rs.errors import CapacityError, ConfigError, KvOffloadError
from kvoffload_rs.memory import MemoryLimit, machine_memory
from kvoffload_rs.values import parse_bool, parse_bytes

MEMORY = MemoryLimit(64 * 2**30, "the machine's memory")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (4096, 4096),
        (1e10, 10_000_000_000),
        (0.5 * 2**30, 2**29),
        ("4096", 4096),
        ("1_000", 1000),
        ("8GiB", 8 * 2**30),
        ("8 GB", 8_000_000_000),
        ("8G", 8_000_000_000),
        ("8Gi", 8 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5 gib", 3 * 2**29),
        (" 2 TB ", 2 * 10**12),
        ("7B", 7),
        ("-1", -1),
        ("50%", 32 * 2**30),
        ("12.5 %", 8 * 2**30),
        ("100%", 64 * 2**30),
    ],
)
def test_bytes_are_read(text: object, number: int) -> None:
    assert parse_bytes("cpu_bytes_to_use", text, MEMORY) == number


@pytest.mark.parametrize(
    "text",
    ["", "lots", "8 XB", "8GiBs", "GiB", "0%", "101%", "-5%", True, False, [1], float("inf"),
     float("nan"), "1e9", "0x10", "8 G iB"],
)  # fmt: skip
def test_bytes_that_make_no_sense_are_refused(text: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes("cpu_bytes_to_use", text, MEMORY)
    assert caught.value.field == "cpu_bytes_to_use"
    assert caught.value.value is text
    assert caught.value.hint


@pytest.mark.parametrize("value", [True, 1, "true", "True", "yes", "ON", "1"])
def test_true(value: object) -> None:
    assert parse_bool("f", value) is True


@pytest.mark.parametrize("value", [False, 0, "false", "False", "no", "off", "0", ""])
def test_false_is_never_taken_for_true(value: object) -> None:
    assert parse_bool("f", value) is False


@pytest.mark.parametrize("value", ["maybe", 2, -1, 1.0, [], {}])
def test_other_truth_values_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="neither true nor false"):
        parse_bool("f", value)


def test_defaults() -> None:
    assert Settings.parse({}) == Settings()
    assert Settings.parse({"eviction_policy": None, "verify": None}) == Settings()
    assert Settings().offload_prompt_only is True
    assert Settings().partial_admission is False


def test_every_setting_is_read() -> None:
    settings = Settings.parse(
        {
            "spec_name": "KvOffloadSpec",
            "cpu_bytes_to_use": "1GiB",
            "eviction_policy": "ARC",
            "blocks_per_chunk": "4",
            "store_threshold": 2,
            "max_tracker_size": "1000",
            "offload_prompt_only": "false",
            "self_describing_kv_events": "true",
            "partial_admission": 1,
            "verify": "sample",
            "verify_sample": 3,
            "wait_timeout_s": "2.5",
            "write_deadline_s": 30,
            "fault_injection": {"seed": 1, "loads": "neighbour"},
        }
    )
    assert settings == Settings(
        cpu_bytes=2**30,
        eviction_policy="arc",
        blocks_per_chunk=4,
        store_threshold=2,
        max_tracker_size=1000,
        offload_prompt_only=False,
        self_describing_kv_events=True,
        partial_admission=True,
        verify="sample",
        verify_sample=3,
        wait_timeout_s=2.5,
        write_deadline_s=30.0,
        fault_injection={"seed": 1, "loads": "neighbour"},
    )


def test_off_as_yaml_reads_it() -> None:
    assert Settings.parse({"verify": False}).verify == "off"


def test_fault_injection_as_json() -> None:
    assert Settings.parse({"fault_injection": '{"stall_job": 3}'}).fault_injection == {
        "stall_job": 3
    }
    assert Settings.parse({"fault_injection": {}}).fault_injection is None
    one_rank = Settings.parse({"fault_injection": {"rank": 1, "fail_every_load": 2}})
    assert one_rank.on_rank(1).fault_injection == {"fail_every_load": 2}
    assert one_rank.on_rank(0).fault_injection is None
    assert Settings().on_rank(0) == Settings()
    assert Settings.parse({"fault_injection": ""}).fault_injection is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eviction_policy", "fifo"),
        ("eviction_policy", 3),
        ("eviction_policy", False),
        ("verify", "some"),
        ("verify", True),
        ("block_size", 0),
        ("block_size", "many"),
        ("blocks_per_chunk", 0),
        ("blocks_per_chunk", 1.5),
        ("blocks_per_chunk", True),
        ("store_threshold", -1),
        ("max_tracker_size", 0),
        ("verify_sample", 0),
        ("wait_timeout_s", 0),
        ("wait_timeout_s", "soon"),
        ("wait_timeout_s", float("inf")),
        ("write_deadline_s", -1),
        ("write_deadline_s", True),
        ("offload_prompt_only", "perhaps"),
        ("fault_injection", "off"),
        ("fault_injection", [1]),
        ("fault_injection", {"sed": 1}),
        ("secondary_tiers", [{"type": "fs"}]),
        ("canonical_layout", True),
        ("canonical_layout", "true"),
    ],
)
def test_bad_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.parse({field: value})
    assert caught.value.field == field
    assert caught.value.hint
    assert field in str(caught.value)
    assert caught.value.hint in str(caught.value)


def test_what_is_refused_only_when_it_asks_for_something() -> None:
    Settings.parse({"secondary_tiers": [], "canonical_layout": "false"})
    Settings.parse({"secondary_tiers": None, "canonical_layout": None})


def test_one_chunk_size_only() -> None:
    with pytest.raises(ConfigError, match="both given"):
        Settings.parse({"block_size": 32, "blocks_per_chunk": 2})


# --- keys ----------------------------------------------------------------------------------------


def test_known_and_foreign_keys_are_left_alone() -> None:
    extra = {"cpu_bytes_to_use": 1, "sync_load_budget_bytes": 0, "spec_name": "KvOffloadSpec"}
    assert check_keys(extra, {"sync_load_budget_bytes"}, {}) == []


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("cpu_byte_to_use", "cpu_bytes_to_use"),
        ("cpu_bytes_ot_use", "cpu_bytes_to_use"),
        ("CPU_BYTES_TO_USE", "cpu_bytes_to_use"),
        ("cpu-bytes-to-use", "cpu_bytes_to_use"),
        ("evictoin_policy", "eviction_policy"),
        ("block_per_chunks", "blocks_per_chunk"),
        ("blocksize", "block_size"),
        ("verfy", "verify"),
        ("sync_load_budget_byte", "sync_load_budget_bytes"),
        ("tier_pol_interval_s", "tier_poll_interval_s"),
    ],
)
def test_a_misspelt_key_is_an_error_that_names_the_right_one(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_keys({wrong: 7}, {"sync_load_budget_bytes"}, {"tier_poll_interval_s": "no"})
    assert caught.value.field == wrong
    assert caught.value.value == 7
    assert repr(right) in str(caught.value)
    assert repr(wrong) in str(caught.value)


def test_other_unknown_keys_are_warnings() -> None:
    warnings = check_keys({"my_own_note": 1, "backpressure": {}}, (), {"backpressure": "why not"})
    assert len(warnings) == 2
    assert "'my_own_note' is unknown" in warnings[0]
    assert "'backpressure' has no effect: why not" in warnings[1]


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ("", "", 0),
        ("abc", "abc", 0),
        ("abc", "abd", 1),
        ("abc", "acb", 1),
        ("abc", "ab", 1),
        ("abc", "xabc", 1),
        ("ca", "abc", 3),
        ("abcd", "badc", 2),
        ("abcdef", "xyz", 3),
        ("", "ab", 2),
        ("kitten", "sitting", 3),
    ],
)
def test_edit_distance(a: str, b: str, distance: int) -> None:
    assert edit_distance(a, b, 2) == distance
    assert edit_distance(b, a, 2) == distance


def test_the_nearest_key_is_suggested() -> None:
    assert near_miss("abcd", {"abxx", "abcx", "abcy"}) == "abcx"
    assert near_miss("abcd", {"wxyz"}) is None
    assert near_miss("abcd", ()) is None


# --- capacity ------------------------------------------------------------------------------------


def test_capacity_is_divided_among_all_ranks() -> None:
    capacity = plan_capacity(
        10_000_000, bytes_per_block=1000, blocks_per_chunk=2, regions=4, memory=MEMORY
    )
    assert capacity.slot_bytes == 2048  # 2000, in units of 64
    assert capacity.num_slots == 10_000_000 // (2048 * 4)
    assert capacity.total_bytes <= 10_000_000


@pytest.mark.parametrize("given", [None, 0, -1, 8191])
def test_too_little_memory_says_what_one_slot_needs(given: int | None) -> None:
    with pytest.raises(CapacityError) as caught:
        plan_capacity(given, bytes_per_block=1000, blocks_per_chunk=2, regions=4, memory=MEMORY)
    assert caught.value.field == "cpu_bytes_to_use"
    assert caught.value.value == given
    assert "8192 bytes" in str(caught.value)
    assert "2048 in each of 4" in str(caught.value)
    assert caught.value.hint


def test_just_enough_memory_for_one_slot() -> None:
    assert plan_capacity(8192, bytes_per_block=1000, blocks_per_chunk=2, regions=4).num_slots == 1


def test_more_memory_than_the_machine_has() -> None:
    with pytest.raises(CapacityError) as caught:
        plan_capacity(
            MEMORY.bytes + 1, bytes_per_block=64, blocks_per_chunk=1, regions=1, memory=MEMORY
        )
    assert str(MEMORY.bytes) in str(caught.value)
    assert str(MEMORY.bytes + 1) in str(caught.value)
    assert MEMORY.source in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store_threshold", 2**40),
        ("max_tracker_size", 4_000_000_000),
        ("verify_sample", "9" * 30),
        ("wait_timeout_s", 10**400),
        ("wait_timeout_s", 1e30),
        ("write_deadline_s", "1e30"),
        ("cpu_bytes_to_use", "9" * 5000),
        ("cpu_bytes_to_use", "9" * 400 + ".5"),
    ],
)
def test_numbers_beyond_all_bounds(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        Settings.parse({field: value})
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


def test_no_kv_cache() -> None:
    with pytest.raises(CapacityError, match="no KV cache"):
        plan_capacity(1 << 30, bytes_per_block=0, blocks_per_chunk=1, regions=1)


def test_more_slots_than_can_be_numbered() -> None:
    with pytest.raises(CapacityError, match="at most 1073741824"):
        plan_capacity(2**38, bytes_per_block=64, blocks_per_chunk=1, regions=1)


# --- memory --------------------------------------------------------------------------------------


def test_this_machine_has_memory_and_always_the_same() -> None:
    limit = machine_memory()
    assert limit is not None
    assert limit.bytes > 1 << 20
    assert machine_memory() == limit


# --- errors --------------------------------------------------------------------------------------

ERRORS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_survive_pickling(kind: type[KvOffloadError]) -> None:
    error = kind("it broke", field="f", value=[1], hint="Mend it.", job=3, slot=4)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert isinstance(again, KvOffloadError)
    assert vars(again) == vars(error)
    assert str(again) == "it broke. Mend it."
    assert str(kind("it broke")) == "it broke"
    assert str(kind("It broke.", hint="Mend it.")) == "It broke. Mend it."


def test_a_percentage_without_known_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload_rs.values.machine_memory", lambda: None)
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_bytes("cpu_bytes_to_use", "50%")
