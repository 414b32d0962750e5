"""A device that no run of one's own was measured on: what is asked without a directory.

Data sheets, published rates and NCCL's cost model answer; every answer says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ...calib.arguments import apply_options
from ...calib.errors import CalibrationError, ConfigError
from ...calib.memory import known_device
from ...calib.search import layout_label
from ...calib.workload import Batch, ModelShape, Parallelism, Precision, RunConfig
from ..options.flags import read_cluster
from .run import Run, quiet_search

if TYPE_CHECKING:
    from ..known.machines import Machine
    from ..known.runs import Loaded
    from .other_run import OtherRun
    from .planned import Searching

_GPUS_PER_NODE = 8
"""GPUs of a usual server, for a ``config.json``, which names no node."""
# Divisible by every degree that is asked for before a file says the sizes of the model.
_ANY_MODEL = ModelShape(
    num_layers=960,
    hidden_size=16384,
    ffn_hidden_size=65536,
    num_attention_heads=128,
    num_query_groups=128,
    kv_channels=128,
    seq_length=8192,
    vocab_size=131072,
)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Unmeasured(Run):
    """A described run on a device by what is published of it; nothing is read or written."""

    described: RunConfig
    config: Path | None = None
    command: tuple[str, ...] = ()

    @cached_property
    def run_id(self) -> str:
        """The device, by its driver's name."""
        return self.machine().name

    def __repr__(self) -> str:
        return f"Run(device={self.described.device!r}, layout={layout_label(self.described)!r})"

    def parts(self) -> Iterator[str]:
        """Its layout, and what answers rest on."""
        yield f"{layout_label(self.described)} {self.machine().basis}"

    @cached_property
    def _loaded(self) -> Loaded:
        raise CalibrationError("a device alone has no records; train with --calibrate first")

    def _other(
        self,
        config: Path | str | None,
        command: Sequence[str],
        anyway: bool,
        assume_no_effect: Sequence[str],
    ) -> OtherRun:
        if config is None and not command:
            config, command = self.config, self.command
        return super()._other(config, command, anyway, assume_no_effect)

    def _open(self, device: str | None) -> Machine:
        if device not in self._opened:
            from ...calib.differences import modelled_nearest  # slow to import, like these
            from ..known.machine_fits import device_machine
            from ..known.table_files import published_rows

            config = replace(self.described, device=device or self.described.device)
            machine = device_machine(config, read_cluster(self.cluster))
            nearest = modelled_nearest(machine.own, machine.steps, published_rows())
            basis = f"from published measurements of {config.device}, no run of yours"
            basis += f"; {nearest}" * bool(nearest)
            self._opened[device] = replace(machine, problems=(), basis=basis)
        return self._opened[device]


def unmeasured(
    device: str,
    *,
    config: Path | None = None,
    command: Sequence[str] = (),
    options: Sequence[str] = (),
    num_ranks: int = 0,
    cluster: Path | None = None,
    searching: Searching = quiet_search,
) -> Unmeasured:
    """The run that a file or a command describes, on a device by its short name.

    ``options`` are Megatron's, and say what a ``config.json`` leaves open, not a command;
    ``num_ranks``: 0, as the command says.  Raises ``ConfigError`` where the run or its ranks are
    not described.
    """
    from ..options.config_files import described_run, line_inside

    name = known_device(device).driver_name
    base = _any_run(name, num_ranks)
    base = base if command else apply_options(base, options)
    found = described_run(config, line_inside(command), base, num_ranks=num_ranks)
    if found is None:
        raise ConfigError(
            "without a directory the run has to be described; give its command after --, or "
            "--config FILE"
        )
    return Unmeasured(
        directory=Path(),
        cluster=cluster,
        searching=searching,
        described=replace(found.config, device=name),
        config=config,
        command=tuple(command),
    )


def _any_run(device: str, num_ranks: int) -> RunConfig:
    """A run of data parallelism alone, as Megatron's own recipes begin: bf16 and a distributed
    optimizer that overlaps."""
    ranks = max(num_ranks, 1)
    par = Parallelism(
        dp=ranks,
        is_optimizer_distributed=True,
        overlaps_grad_reduce=True,
        overlaps_param_gather=True,
        ranks_per_node=min(_GPUS_PER_NODE, ranks),
    )
    return RunConfig(
        model=_ANY_MODEL,
        parallelism=par,
        batch=Batch(micro_batch_size=1, global_batch_size=ranks),
        precision=Precision.BF16,
        fuses_norms=True,
        device=device,
    )
