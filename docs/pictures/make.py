"""The pictures of docs/how-it-works.md, drawn by the code for those of a report.

python docs/pictures/make.py    writes docs/pictures/*.svg
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import forerun
from forerun.calib.timeline import Pipeline, pipeline_costs, spans
from forerun.launch.store import read_forecasts
from forerun.launch.views import Drawing, finish_chart, timeline_chart, waterfall

HERE = Path(__file__).parent
GOLDEN = HERE.parents[1] / "tests" / "golden"
WIDTH = 720
_PP, _MICROBATCHES = 4, 8


def pictures() -> Iterator[tuple[str, Drawing]]:
    """Yield each picture with its name."""
    yield "schedule_1f1b", _schedule()
    yield "schedule_interleaved", _schedule(vp=2)
    yield "terms", _terms()
    yield "forecasts", _forecasts()


def _schedule(vp: int = 1) -> Drawing:
    """Draw four stages, eight micro-batches; a forward pass takes 10 ms, a backward one 20 ms."""
    chunks = _PP * vp
    costs = pipeline_costs([0.010 / vp] * chunks, [0.020 / vp] * chunks, num_virtual_stages=vp)
    pipeline = Pipeline(num_stages=_PP, num_microbatches=_MICROBATCHES, num_virtual_stages=vp)
    return _some(timeline_chart(spans(costs, pipeline), (), WIDTH))


def _terms() -> Drawing:
    """Show why a larger micro-batch is faster in a run of two ranks."""
    with TemporaryDirectory() as folder:
        home = Path(shutil.copytree(GOLDEN / "cpu_dp2", Path(folder) / "run"))
        answer = forerun.load(home).explain("tp1 mbs4", "running")
    return waterfall(answer.found, WIDTH)


def _forecasts() -> Drawing:
    """Draw a Megatron-LM run with a batch-size ramp: each forecast of its end, and the end."""
    logged = read_forecasts(GOLDEN / "megatron_forecasts")
    made, ended = max(
        ((made, logged.ended[run_id]) for run_id, made in logged.made.items()),
        key=lambda run: len(run[0]),
    )
    return _some(finish_chart(made, ended.end_unix_s, WIDTH))


def _some(drawing: Drawing | None) -> Drawing:
    if drawing is None:
        raise SystemExit("nothing to draw")
    return drawing


def main() -> int:
    """Write them; return 0."""
    for name, drawing in pictures():
        (HERE / f"{name}.svg").write_text(drawing.alone(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
