"""The recorded run of two CPU ranks, as if nobody had described its layout."""

from __future__ import annotations

import json
from pathlib import Path

from forerun.calib.records.record_kinds import LoopRecord, to_dict

GOLDEN = Path(__file__).parents[1] / "golden" / "cpu_dp2"


def undescribed(directory: Path, loop: LoopRecord | None) -> Path:
    """Copy the run's records to a directory, with ``loop`` in place of the description."""
    home = directory / "records" / "golden-run"
    home.mkdir(parents=True)
    for path in sorted((GOLDEN / "records" / "golden-run").glob("rank-*.jsonl")):
        header, described, *rest = path.read_text(encoding="utf-8").splitlines(keepends=True)
        assert json.loads(described)["type"] == "run"
        loop_lines = [] if loop is None else [json.dumps(to_dict(loop)) + "\n"]
        (home / path.name).write_text("".join([header, *loop_lines, *rest]), encoding="utf-8")
    return directory
