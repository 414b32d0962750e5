"""Independent probe inside a Megatron-LM worker, which records a run without Forerun's code.

``megatron_matrix.py`` copies this file as ``sitecustomize.py`` into a folder on ``PYTHONPATH``.  It
wraps ``train_step`` and ``training_log`` of ``megatron.training.training`` and writes one JSON file
per rank at exit: bits of losses and gradient norms, hooks and attributes on the model and on torch
before each step, and, if counting is on, every call of a ``ProcessGroup`` that returned a ``Work``.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

TRAINING = "megatron.training.training"
OUT, COUNT, STOP_AT = "MATRIX_PROBE_OUT", "MATRIX_COUNT", "MATRIX_STOP_AT"
_HOOK_DICTS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
)
_SEP = " | "


class Probe:
    """Observations on one rank."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._steps: dict[int, dict[str, Any]] = {}
        self._states: list[dict[str, Any]] = []
        self._classes: dict[str, dict[str, int]] = {}
        self._calls: Counter[str] | None = None
        self._seams: list[str] = []
        atexit.register(self._write)

    def attach(self, training: Any) -> None:
        """Wrap the functions that the loop looks up at each call."""
        if os.environ.get(COUNT) == "1":
            self._count_calls()
        for name, wrap in (("train_step", self._step), ("training_log", self._log)):
            original = getattr(training, name)
            signature = inspect.signature(original)

            def wrapper(*args: Any, _f: Any = (original, signature, wrap), **kwargs: Any) -> Any:
                original, signature, wrap = _f
                given = signature.bind(*args, **kwargs).arguments
                return wrap(given, functools.partial(original, *args, **kwargs))

            setattr(training, name, wrapper)

    def _step(self, given: dict[str, Any], run: Any) -> Any:
        args = importlib.import_module("megatron.training.global_vars").get_args()
        iteration = int(args.curr_iteration)
        step = self._steps.setdefault(iteration, {})
        # Baseline before the first step, when nothing is installed yet.
        self._classes = self._classes or _class_methods()
        step["state"] = self._keep(self._state(given))
        if not self._seams:
            self._seams = _replaced_functions()
        self._calls = Counter()
        result = run()
        step["calls"], self._calls = dict(self._calls), None
        if os.environ.get(STOP_AT) == str(iteration + 1):
            from forerun.hooks.adapters.megatron_training import request_stop

            step["is_stop_requested"] = request_stop()
        return result

    def _log(self, given: dict[str, Any], run: Any) -> Any:
        step = self._steps.setdefault(int(given["iteration"]) - 1, {})
        step["losses"] = {name: _bits(value) for name, value in given["loss_dict"].items()}
        step["grad_norm"] = _bits(given["grad_norm"])
        return run()

    def _keep(self, state: dict[str, Any]) -> int:
        if state not in self._states:
            self._states.append(state)
        return self._states.index(state)

    def _state(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return everything that a tool could have attached, by the names of the functions."""
        import torch

        hooks, attributes = Counter[str](), Counter[str]()
        model = given["model"]
        for chunk in model if isinstance(model, list) else [model]:
            for module in chunk.modules():
                for kind in _HOOK_DICTS:
                    for hook in vars(module).get(kind, {}).values():
                        hooks[f"{kind} {_name(hook)}"] += 1
                for owner in (module, getattr(module, "token_dispatcher", None)):
                    for name, value in _defined_functions(owner):
                        attributes[f"{type(owner).__name__}.{name} {_name(value)}"] += 1
        variables = importlib.import_module("megatron.training.global_vars")
        holders = {"global": getattr(variables, "_GLOBAL_TIMERS", None)}
        for name in ("config", "optimizer"):
            config = given[name] if name == "config" else getattr(given[name], "config", None)
            holders[name] = getattr(config, "timers", None)
        module_globals = torch.nn.modules.module
        return {
            "module hooks": dict(sorted(hooks.items())),
            "instance attributes": dict(sorted(attributes.items())),
            "timers": {name: _name(type(value)) for name, value in holders.items()},
            "gc callbacks": [_name(callback) for callback in gc.callbacks],
            "class methods": _changed(self._classes),
            "global hooks": {
                name: len(value)
                for name, value in sorted(vars(module_globals).items())
                if name.startswith("_global_") and hasattr(value, "__len__")
            },
            "optimizer hooks": [
                len(getattr(sys.modules["torch.optim.optimizer"], name))
                for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
            ],
            "modes": [
                torch._C._len_torch_function_stack(),
                torch._C._len_torch_dispatch_stack(),
                torch.autograd._profiler_enabled(),
            ],
            "tracing": [_name(sys.getprofile()), _name(sys.gettrace())],
        }

    def _count_calls(self) -> None:
        """Count calls that return a ``Work``; the end of a coalesced group is no transfer."""
        from torch._C._distributed_c10d import ProcessGroup, Work

        for name, original in list(vars(ProcessGroup).items()):
            if name.startswith("__") or name == "_end_coalescing" or not callable(original):
                continue

            @functools.wraps(original)
            def counted(group: Any, *args: Any, _f: Any = (name, original), **kwargs: Any) -> Any:
                work = _f[1](group, *args, **kwargs)
                if self._calls is not None and isinstance(work, Work):
                    self._calls[_describe(_f[0], group, (*args, *kwargs.values()))] += 1
                return work

            setattr(ProcessGroup, name, counted)

    def _write(self) -> None:
        rank = int(os.environ["RANK"])
        value = {
            "rank": rank,
            "states": self._states,
            "steps": self._steps,
            "seams": self._seams,
        }
        (self._out / f"rank-{rank}.json").write_text(json.dumps(value), encoding="utf-8")


def _replaced_functions() -> list[str]:
    """Return names in Megatron's modules bound to code of the tool's hooks, and its owner."""
    replaced = []
    # A thread may import meanwhile, so iterate over an atomic copy.
    for module_name, module in sorted(sys.modules.copy().items()):
        if not module_name.startswith("megatron."):
            continue
        for name, value in sorted(vars(module).copy().items()):
            place = getattr(value, "__globals__", {}).get("__name__", "")
            if place.startswith("forerun.hooks."):
                replaced.append(f"{module_name}.{name}")
    return replaced


def _class_methods() -> dict[str, dict[str, int]]:
    import torch
    from megatron.core import timers
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from torch._C._distributed_c10d import ProcessGroup, Work

    owners: tuple[Any, ...] = (ProcessGroup, Work, torch.nn.Module, LanguageModule)
    owners += (timers.Timers, timers.Timer, timers.DummyTimer, torch.autograd)
    return {owner.__name__: {name: id(f) for name, f in vars(owner).items()} for owner in owners}


def _changed(before: dict[str, dict[str, int]]) -> list[str]:
    after = _class_methods()
    return [
        f"{owner}.{name}"
        for owner, names in before.items()
        for name in sorted({*names, *after[owner]})
        if names.get(name) != after[owner].get(name)
    ]


def _defined_functions(owner: Any) -> list[tuple[str, Any]]:
    import torch

    return [
        (name, value)
        for name, value in getattr(owner, "__dict__", {}).items()
        if callable(value) and not isinstance(value, (torch.nn.Module, torch.Tensor, type))
    ]


def _name(function: Any) -> str:
    """Return module and name of a function, whatever it is wrapped in."""
    while isinstance(function, functools.partial):
        function = function.func
    if function is None:
        return ""
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}.{owner.__qualname__}"


def _bits(value: Any) -> str:
    """Return all digits of a number; tensors of one or more elements are supported."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return " ".join(_bits(item) for item in value)
    return "" if value is None else float(value).hex()


def _describe(name: str, group: Any, values: tuple[Any, ...]) -> str:
    import torch.distributed as dist

    ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
    sizes = [_nbytes(value) for value in values[:2]]
    peers = [str(value) for value in values if type(value) is int][:1]
    return _SEP.join((name, group.group_desc, ranks, ",".join(map(str, sizes)), *peers))


def _nbytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes, value))
    return value.numel() * value.element_size() if hasattr(value, "element_size") else 0


class _AfterImport:
    """Lets the other finders find the module, and calls back after its execution."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._is_searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != TRAINING or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec: Any = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._probe.attach(module)

        spec.loader.exec_module = exec_module
        return spec


if "RANK" in os.environ and os.environ.get(OUT):
    sys.meta_path.insert(0, _AfterImport(Probe(Path(os.environ[OUT]))))
