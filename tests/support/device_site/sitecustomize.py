"""Puts the stand-in for a GPU of ``device_timeline`` into every worker of a launch.

This folder on ``PYTHONPATH`` and ``FORERUN_TEST_TIMELINE=FOLDER`` are the switch; the run needs
Forerun's CPU stand-in (``FORERUN_DEVICE=cpu`` or ``--calibrate-device=cpu``).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUT = "FORERUN_TEST_TIMELINE"
SUPPORT = str(Path(__file__).resolve().parents[1])


def _timeline() -> Any:
    return importlib.import_module("device_timeline")


def _over_stand_in(module: Any) -> None:
    install = module.install

    def installed() -> None:
        install()
        _timeline().install()

    module.install = installed


def _believe_in_device(module: Any) -> None:
    of_parameters = module._device

    def device(models: Any) -> Any:
        import torch

        return torch.device("cuda") if _timeline().timeline() else of_parameters(models)

    module._device = device


def _on_virtual_time(module: Any) -> None:
    """Give the stopwatch the host clock of the timeline that its events belong to."""
    defaults = module.DeviceStopwatch.__init__.__kwdefaults__
    of_host = defaults["clock"]

    def clock() -> int:
        one = _timeline().timeline()
        return of_host() if one is None else round(one.clock.host_s * 1e9)

    defaults["clock"] = clock


def _notify_steps(module: Any) -> None:
    train_step = module.train_step
    signature = inspect.signature(train_step)

    def stepped(*args: Any, **kwargs: Any) -> Any:
        one = _timeline().timeline()
        if one is None:
            return train_step(*args, **kwargs)
        variables = importlib.import_module("megatron.training.global_vars")
        one.name(signature.bind(*args, **kwargs).arguments["model"])
        with one.step(int(variables.get_args().curr_iteration)):
            return train_step(*args, **kwargs)

    module.train_step = stepped


def _notify_losses(module: Any) -> None:
    training_log = module.training_log
    signature = inspect.signature(training_log)

    def logged(*args: Any, **kwargs: Any) -> Any:
        one = _timeline().timeline()
        if one is not None:
            given = signature.bind(*args, **kwargs).arguments
            values = [*given["loss_dict"].values(), given["grad_norm"]]
            one.note(int(given["iteration"]) - 1, values)
        return training_log(*args, **kwargs)

    module.training_log = logged


def _name_methods(module: Any, owners: dict[str, tuple[str, ...]]) -> None:
    """Attribute work to these methods of Megatron's, as to its modules."""
    for class_name, names in owners.items():
        owner = getattr(module, class_name)
        for name in names:
            if name in vars(owner):
                setattr(owner, name, _named(vars(owner)[name], class_name, name))


def _named(method: Callable[..., Any], class_name: str, name: str) -> Callable[..., Any]:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        one = _timeline().timeline()
        if one is None:
            return method(self, *args, **kwargs)
        layer = int(getattr(self, "layer_number", None) or 0)
        with one.calls.frame(name, classes=(class_name,), layer=layer):
            return method(self, *args, **kwargs)

    called.__name__ = name
    called.__qualname__ = method.__qualname__
    called.__module__ = method.__module__
    return called


def _loss(module: Any) -> None:
    _name_methods(module, {"LanguageModule": ("compute_language_model_loss",)})


def _dispatchers(module: Any) -> None:
    ways = (
        "dispatch_preprocess", "dispatch_postprocess", "combine_preprocess", "combine_postprocess",
    )  # fmt: skip
    _name_methods(module, {"MoEAlltoAllTokenDispatcher": ways, "MoEAllGatherTokenDispatcher": ways})


def _fsdp(module: Any) -> None:
    one = _timeline().timeline()
    if one is not None:
        one.put_fsdp(module)


def _use_timeline_streams(module: Any) -> None:
    """FSDP2 asks for the device of its mesh, which is the CPU: its streams are the timeline's."""
    handle = module._get_device_handle

    def device_handle(device_type: str = "cuda") -> Any:
        import torch

        return torch.cuda if _timeline().timeline() else handle(device_type)

    module._get_device_handle = device_handle


_AFTER: dict[str, tuple[Callable[[Any], None], ...]] = {
    # The CPU stand-in; where it lies is written here alone.
    "forerun.recipes.stand_in_cuda.install": (_over_stand_in,),
    "forerun.hooks.sensors.stopwatch": (_on_virtual_time,),
    "forerun.hooks.session.instruments": (_believe_in_device,),
    "megatron.training.training": (_notify_steps, _notify_losses),
    "megatron.core.models.common.language_module.language_module": (_loss,),
    "megatron.core.transformer.moe.token_dispatcher": (_dispatchers,),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": (_fsdp, _use_timeline_streams),
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": (_use_timeline_streams,),
    "torch.distributed.fsdp._fully_shard._fsdp_state": (_use_timeline_streams,),
}


class _AfterImport:
    """Lets the other finders find a module, and calls back when it has been executed."""

    def __init__(self) -> None:
        self._searched: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _AFTER or name in self._searched:
            return None
        self._searched.add(name)
        try:
            spec: Any = importlib.util.find_spec(name)
        finally:
            self._searched.discard(name)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for callback in _AFTER[name]:
                callback(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get(OUT) and "RANK" in os.environ:
    sys.path.append(SUPPORT)
    sys.meta_path.insert(0, _AfterImport())
