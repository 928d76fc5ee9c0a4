"""The plugin: it registers names, loads nothing, and never gets in anybody's way."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest
from kvoffload_rs.vllm import plugin

FACTORY = "vllm.v1.kv_offload.factory"


class Factory:
    """Like vLLM's: raises for a name it has."""

    _registry: dict[str, tuple[str, str]]

    @classmethod
    def register_spec(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls._registry:
            raise ValueError(f"{name} is registered")
        cls._registry[name] = (module_path, class_name)


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> type[Factory]:
    """A stand-in for vLLM's factory module."""
    fresh = type("OffloadingSpecFactory", (Factory,), {"_registry": {}})
    for name in ("vllm", "vllm.v1", "vllm.v1.kv_offload", FACTORY):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[FACTORY].OffloadingSpecFactory = fresh  # type: ignore[attr-defined]
    return fresh


def test_registers_strings(factory: type[Factory]) -> None:
    plugin.register()
    assert factory._registry == {"KvOffloadSpec": ("kvoffload_rs.vllm.spec", "KvOffloadSpec")}


def test_registers_the_connector_beside_it(
    factory: type[Factory], monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = []
    connectors = type(
        "KVConnectorFactory",
        (),
        {"_registry": {}, "register_connector": lambda *names: registered.append(names)},
    )
    name = "vllm.distributed.kv_transfer.kv_connector.factory"
    for part in ("vllm.distributed", "vllm.distributed.kv_transfer", name.rpartition(".")[0], name):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    sys.modules[name].KVConnectorFactory = connectors  # type: ignore[attr-defined]
    plugin.register()
    module = "kvoffload_rs.vllm.connector"
    assert registered == [("KvOffloadConnector", module, "KvOffloadConnector")]
    assert "KvOffloadSpec" in factory._registry


def test_may_be_called_again(factory: type[Factory]) -> None:
    plugin.register()
    first = dict(factory._registry)
    plugin.register()
    assert factory._registry == first


def test_leaves_another_spec_of_that_name_alone(factory: type[Factory]) -> None:
    factory._registry["KvOffloadSpec"] = ("elsewhere", "KvOffloadSpec")
    plugin.register()
    assert factory._registry == {"KvOffloadSpec": ("elsewhere", "KvOffloadSpec")}


@pytest.mark.parametrize("broken", ["no class", "no registry", "no method", "raises"])
def test_a_changed_vllm_is_no_error(
    factory: type[Factory], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    module: Any = sys.modules[FACTORY]
    if broken == "no class":
        del module.OffloadingSpecFactory
    elif broken == "no registry":
        module.OffloadingSpecFactory = type("F", (), {"register_spec": Factory.register_spec})
    elif broken == "no method":
        module.OffloadingSpecFactory = type("F", (), {"_registry": {}})
    else:

        def refuse(*_: object) -> None:
            raise RuntimeError("not today")

        monkeypatch.setattr(factory, "register_spec", refuse)
    plugin.register()


def test_a_vllm_that_does_not_load_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    monkeypatch.setitem(sys.modules, FACTORY, None)  # makes the import raise
    plugin.register()


def test_loads_nothing_of_its_own_accord() -> None:
    """Without torch in the process, and with vLLM's factory there, nothing heavy is loaded."""
    code = f"""
import sys, types
from kvoffload_rs.vllm import plugin
plugin.register()
assert not any(m.split('.')[0] in ('torch', 'vllm', 'numpy') for m in sys.modules)
for name in ('vllm', 'vllm.v1', 'vllm.v1.kv_offload', {FACTORY!r}):
    sys.modules[name] = types.ModuleType(name)
class F:
    _registry = {{}}
    register_spec = classmethod(lambda c, n, m, k: c._registry.update({{n: (m, k)}}))
sys.modules[{FACTORY!r}].OffloadingSpecFactory = F
plugin.register()
assert list(F._registry) == ['KvOffloadSpec']
assert not any(m.split('.')[0] in ('torch', 'numpy') for m in sys.modules)
print(sorted(m for m in sys.modules if m.startswith('kvoffload_rs')))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(
        ["kvoffload_rs", "kvoffload_rs.errors", "kvoffload_rs.vllm", "kvoffload_rs.vllm.plugin"]
    )


def test_with_the_installed_vllm() -> None:
    """vLLM's own loader finds the entry point, calls it, and resolves the name to our class."""
    pytest.importorskip("vllm")
    code = """
import sys
import vllm.plugins
vllm.plugins.load_general_plugins()
assert 'kvoffload_rs.vllm.plugin' in sys.modules, 'the entry point was not found'
assert 'kvoffload_rs._core' not in sys.modules
assert 'kvoffload_rs.vllm.spec' not in sys.modules
assert 'kvoffload_rs.vllm.connector' not in sys.modules
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
assert 'KvOffloadSpec' in OffloadingSpecFactory._registry
from kvoffload_rs.vllm.plugin import register
register()
by_name = OffloadingSpecFactory._registry['KvOffloadSpec']()
import kvoffload_rs.vllm
assert by_name is kvoffload_rs.vllm.KvOffloadSpec
from vllm.v1.kv_offload.base import OffloadingSpec
assert issubclass(by_name, OffloadingSpec)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
assert KVConnectorFactory._registry['KvOffloadConnector']() is kvoffload_rs.vllm.KvOffloadConnector
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
