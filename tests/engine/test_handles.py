"""The module that carries a handle survives whatever happens to modules."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import moe_ops
from tests.engine.support import H, add_layer, expected, make_batch, new_engine, unused_name
from tests.support import assert_close


@pytest.fixture(scope="module")
def layer():
    with new_engine() as engine:
        yield add_layer(engine)


class Model(torch.nn.Module):
    def __init__(self, experts: moe_ops.CpuExperts) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(H)
        self.experts = experts


def works(experts: moe_ops.CpuExperts) -> None:
    batch = make_batch(3)
    out = experts.sync(experts.submit(*batch)[0], torch.zeros(3, H))
    assert_close(out, expected(experts, batch), max_tol=5e-5, rms_tol=5e-6)


def test_copy(layer):
    twin = copy.copy(layer)
    twin.handle.fill_(0)  # a shallow copy has a buffer of its own
    works(layer)
    works(copy.copy(layer))


def test_deepcopy(layer):
    model = Model(layer)
    twin = copy.deepcopy(model)
    assert twin.experts is not layer and twin.experts.handle.data_ptr() != layer.handle.data_ptr()
    assert twin.experts.shared is layer.shared  # the weights stay where they are
    layer.handle.fill_(123)  # what deepcopy shares, or copies, is not trusted
    works(copy.deepcopy(Model(layer)).experts)
    layer._refill()
    works(twin.experts)


def test_state_dict(layer):
    model = Model(layer)
    state = model.state_dict()
    assert not any("handle" in name for name in state)
    for assign in (False, True):
        layer.handle.fill_(0)
        model.load_state_dict(state, assign=assign, strict=True)
        works(model.experts)


def test_to_dtype_and_device(layer):
    model = Model(layer)
    for step in (
        lambda: model.half(),
        lambda: model.to(torch.bfloat16),
        lambda: model.double(),
        lambda: model.to("cpu"),
        lambda: model.cpu(),
    ):
        layer.handle.fill_(0)
        step()
        assert model.experts.handle.dtype == torch.int64
        works(model.experts)


def test_meta_and_back(layer):
    model = Model(layer).to("meta")
    assert model.experts.handle.device.type == "meta"
    x, ids, weights = (tensor.to("meta") for tensor in make_batch(3))
    ticket, deferred = model.experts.submit(x, ids, weights)  # shapes can be computed
    assert ticket.device.type == "meta" and deferred.shape == (1,)
    model.to_empty(device="cpu")  # the buffer holds anything now
    works(model.experts)


def test_garbage_never_names_a_stranger(layer):
    layer.handle.copy_(torch.randint(-(2**62), 2**62, (1,)))
    with pytest.raises(ValueError, match="engine must be the handle of experts in a living CpuMoeEngine"):
        layer.submit(*make_batch(3))
    layer._refill()


@pytest.mark.parametrize("dump", ["pickle", "torch"])
def test_pickle(layer, dump):
    if dump == "pickle":
        twin = pickle.loads(pickle.dumps(layer))
    else:
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    works(twin)


def test_pickle_without_the_engine():
    with new_engine() as engine:
        data = pickle.dumps(add_layer(engine))
        with pytest.raises(TypeError, match="cannot be pickled: it owns threads"):
            pickle.dumps(engine)
    with pytest.raises(RuntimeError, match="must be registered in this process before it is unpickled"):
        pickle.loads(data)


def test_the_same_name_in_another_engine_object():
    """A handle is a function of the names: what was exported or baked stays valid when the engine is built again."""
    name, handles = unused_name(), []
    for _ in range(2):
        with moe_ops.CpuMoeEngine(name, threads=1) as engine:
            handles.append(int(add_layer(engine, "layers.7").handle))
            assert handles[-1] == torch.ops.moe_ops._engine_handle(f"{name}/layers.7")
    assert handles[0] == handles[1]


def test_modules_of_a_closed_engine_say_so():
    with new_engine() as engine:
        layer = add_layer(engine)
    for use in (lambda: layer.submit(*make_batch(2)), layer.loaded, lambda: layer.read_expert(0)):
        with pytest.raises(ValueError, match="must be the handle of experts in a living CpuMoeEngine"):
            use()
    with pytest.raises(RuntimeError, match="CpuMoeEngine: the engine is closed"):
        engine.stats()
