"""The recorded run of two CPU ranks, as if nobody had described its layout."""

from __future__ import annotations

import json
from pathlib import Path

from forerun.calib.records.record_kinds import LoopRecord, to_dict

GOLDEN = Path(__file__).parents[1] / "golden" / "cpu_dp2"


def undescribed(directory: Path, loop: LoopRecord | None) -> Path:
    """Its records in a directory, with what the loop has shown in the description's place."""
    home = directory / "records" / "golden-run"
    home.mkdir(parents=True)
    for path in sorted((GOLDEN / "records" / "golden-run").glob("rank-*.jsonl")):
        header, described, *rest = path.read_text(encoding="utf-8").splitlines(keepends=True)
        assert json.loads(described)["type"] == "run"
        told = [] if loop is None else [json.dumps(to_dict(loop)) + "\n"]
        (home / path.name).write_text("".join([header, *told, *rest]), encoding="utf-8")
    return directory
