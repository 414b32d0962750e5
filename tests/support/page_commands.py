"""Commands of the pages, and substitutes for the directories and words that they leave open."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from lint_cases import FLAT
from planted_runs import planted_run

from forerun.calib.records.run_values import NAME, Launch
from forerun.calib.samples.store import write_table
from forerun.calib.samples.table import SampleTable

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GOLDEN = ROOT / "tests" / "golden"
ARGUMENTS = FLAT.partition("pretrain_gpt.py ")[2].split()
"""Words that ``$ARGS`` stands for."""
_STARTS = re.compile(r"(\w+=\S+ )*(forerun|torchrun|pip|make|sbatch|kubectl|bash|python|wandb) ")
_FENCE = re.compile(r"^```(sh|bash)$\n(.*?)^```$", re.M | re.S)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?: {4}.+\n)+)")
_NUM_RANKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A shell line on a page, and its needs as the comment before its block states them."""

    page: str
    line: str
    needs: str

    @property
    def words(self) -> list[str]:
        """Words that a shell passes: quotes removed, ``$ARGS`` filled in, without a redirection."""
        tokens = shlex.split(self.line.partition(" > ")[0])
        return [word for one in tokens for word in (ARGUMENTS if one == "$ARGS" else [one])]


def commands() -> Iterator[Command]:
    """Yield commands of all pages but the reference and those that a test follows to the letter."""
    for path in sorted(DOCS.rglob("*.md")):
        page = str(path.relative_to(DOCS))
        if page.startswith(("reference/", "extending/")):
            continue
        text = path.read_text(encoding="utf-8")
        for match in (*_FENCE.finditer(text), *_INDENTED.finditer(text)):
            lines = [line.strip() for line in match[match.lastindex or 0].splitlines()]
            if not _STARTS.match(lines[0] + " "):
                continue
            before = text[: match.start()].rstrip().rpartition("\n")[2]
            needs = re.fullmatch(r"<!-- needs: (\w+) -->", before)
            for line in filter(None, lines):
                shown = re.sub(r"\s+#.*", "", line)
                yield Command(page=page, line=shown, needs=needs[1] if needs else "")


def placeholder_directories(home: Path) -> dict[str, dict[str, str]]:
    """Return directories below ``home`` by page and placeholder; ``""`` is any other page."""
    recorded, wide, compared = home / "recorded", home / "wide", home / "compared"
    shutil.copytree(GOLDEN / "cpu_dp2", recorded)
    shutil.copy(GOLDEN / "megatron_forecasts" / "forecasts.jsonl", recorded)
    _write_wide_run(wide)
    draw = np.random.default_rng(1)
    both = [planted_run(draw, name=name, num_windows=8) for name in ("RUN_A", "RUN_B")]
    write_table(compared / "samples.parquet", SampleTable.concat(both))
    pair = {"DIR_A": "a", "DIR_B": "b", "baseline": "a", "candidate": "b"}
    for name, table in zip("ab", both, strict=True):
        write_table(home / name / "samples.parquet", table)
    substitutions = {"DIR": str(wide)}
    (nodes,) = re.findall(
        r"^ {4}\{\n.*?^ {4}\}$", (DOCS / "cluster.md").read_text("utf-8"), re.M | re.DOTALL
    )
    (home / "cluster.json").write_text(nodes, encoding="utf-8")
    elsewhere = {"MACHINE": str(home / "machine"), "CLUSTER": str(home / "cluster.json")}
    published = home / "published" / "imported"
    published.mkdir(parents=True)
    rows = pd.read_csv(ROOT / "recipes" / "published" / "steps_dgxc_scaling.csv.gz")
    rows[rows["machine"] == "H100 DGXC BF16"].to_csv(published / "own-steps.csv", index=False)
    return {
        "": {"DIR": str(recorded), "quickstart-out": str(recorded)},
        **dict.fromkeys(("explain.md", "lint.md", "plan.md"), substitutions),
        "normal.md": {"DIR": str(published.parent)},
        "measured-elsewhere.md": {**substitutions, "PROBED": str(recorded), **elsewhere},
        "diff.md": {"DIR": str(compared)} | {word: str(home / one) for word, one in pair.items()},
    }


def _write_wide_run(home: Path) -> None:
    """Write the recorded run as if it had more heads and one replica of sixteen had recorded."""
    there = home / "records" / "golden-run"
    there.mkdir(parents=True)
    note = Launch(
        argv=("pretrain_gpt.py", *ARGUMENTS), launcher=("torchrun", "--nproc-per-node", "16")
    )
    (there / NAME).write_text(json.dumps(note.to_json()), encoding="utf-8")
    for path in sorted((GOLDEN / "cpu_dp2" / "records" / "golden-run").glob("rank-*.jsonl")):
        first, described, *rest = path.read_text(encoding="utf-8").splitlines()
        header, run = json.loads(first), json.loads(described)
        header["world_size"] = run["config"]["parallelism"]["dp"] = _NUM_RANKS
        run["config"]["batch"]["global_batch_size"] = 8 * _NUM_RANKS
        heads = dict.fromkeys(("num_attention_heads", "num_query_groups"), 16)
        run["config"]["model"] |= {"num_layers": 8, "kv_channels": 8, **heads}
        lines = [json.dumps(header), json.dumps(run), *rest]
        (there / path.name).write_text("\n".join(lines) + "\n", encoding="utf-8")
