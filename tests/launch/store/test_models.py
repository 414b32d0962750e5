"""Fitted models as the bytes of a file and back, and nothing else out of such a file."""

from __future__ import annotations

import io
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted_machine import A100, PlantedMachine, batch, random_shapes

from forerun.calib.fit.machine import fit_machine
from forerun.calib.steps.base_times import prior_times
from forerun.calib.workload.operators import OperatorKind, Phase
from forerun.launch.store.model_archive import pack_model, unpack_model

SHAPES = {OperatorKind.NORM: 90, OperatorKind.RMS_NORM: 24, OperatorKind.RESIDUAL: 3}
"""Shapes of each operator: enough for trees, for a forest beside the Gaussian process, and for that
process alone."""


def of_file(value: Any) -> Any:
    return unpack_model(pack_model(value))


def file_of(*objects: Any, **arrays: Any) -> bytes:
    """A file whose value is the last of its objects."""
    file = io.BytesIO()
    text = json.dumps({"value": {"object": len(objects) - 1}, "objects": objects})
    np.savez(file, rest=np.frombuffer(text.encode(), np.uint8), **arrays)
    return file.getvalue()


def test_every_kind_of_model_says_the_same_afterwards() -> None:
    machine, rng = PlantedMachine(), np.random.default_rng(0)
    groups = {
        kind.value: machine.measure(
            batch(kind, Phase.FORWARD, random_shapes(rng, number, 2)), rng, noise=0.03
        )
        for kind, number in SHAPES.items()
    }
    model = fit_machine(groups, device=A100, use_prior=True)
    unpacked = of_file(model)
    for kind in SHAPES:
        operators = batch(kind, Phase.FORWARD, random_shapes(rng, 50, 2))
        one, other = model.predict(kind.value, operators), unpacked.predict(kind.value, operators)
        for name in ("log_time", "low", "high", "octaves"):
            assert np.array_equal(getattr(other, name), getattr(one, name))
    assert len({id(pool) for pool in unpacked.pools.values()}) == len(SHAPES)


def test_values_of_every_kind_come_back() -> None:
    base = prior_times(A100, is_attention_fused=True)
    value = {
        ("a", 1): (True, None, 0.1, math.inf, -math.inf, 2**53 + 1),
        Phase.FORWARD: (np.arange(6.0).reshape(2, 3), np.array([], dtype=np.int64)),
    }
    result = of_file({"value": value, "twice": (base, base)})
    assert result["value"]["a", 1] == value["a", 1]
    array, empty = result["value"][Phase.FORWARD]
    assert np.array_equal(array, np.arange(6.0).reshape(2, 3)) and empty.dtype == np.int64
    assert result["twice"][0] is result["twice"][1]


@pytest.mark.parametrize("value", [lambda: 0, Path("x"), np.array([object()]), np.array(["a"])])
def test_what_is_no_model_is_not_written(value: object) -> None:
    with pytest.raises(TypeError):
        pack_model(value)


@pytest.mark.parametrize(
    "name",
    [
        "fit.machine:fit_machine",
        "fit.machine:np",
        "samples.store:Path",
        "..launch.cli:main",
        "os:system",
        "fit.machine:MachineModel.predict",
        "fit.forest:_Tree",
    ],
)
def test_only_our_own_data_classes_are_made(name: str) -> None:
    with pytest.raises((ValueError, ImportError, AttributeError, TypeError)):
        unpack_model(file_of((name, {})))


def test_other_fields_than_the_class_has_are_refused() -> None:
    fields = {"train_iters": 10}
    with pytest.raises(ValueError, match="other fields"):
        unpack_model(file_of(("workload.config:Cadence", fields)))


def test_nothing_is_unpickled() -> None:
    with pytest.raises(ValueError, match="allow_pickle"):
        unpack_model(file_of(0, other=np.array([object()])))


@pytest.mark.parametrize("cut", [0, 10, -10])
def test_a_torn_file_is_refused(cut: int) -> None:
    whole = pack_model(prior_times(A100, is_attention_fused=True))
    with pytest.raises((EOFError, ValueError, zipfile.BadZipFile)):
        unpack_model(whole[:cut])


def test_another_byte_is_refused() -> None:
    whole = pack_model(prior_times(A100, is_attention_fused=True))
    with pytest.raises(zipfile.BadZipFile):
        unpack_model(whole.replace(b"fused", b"fuxed", 1))
