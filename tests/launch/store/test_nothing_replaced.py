"""Whatever a user has under a name that Forerun writes stays as it is, whoever writes there."""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from golden_copies import golden_copy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.calib.records.files import is_ours
from forerun.launch.cli import main
from forerun.launch.known.table_files import read_frame
from forerun.launch.store.forecast_log import append_end, read_forecasts
from forerun.launch.store.place import FORECASTS, Place, forecasts_path

ROOT = Path(__file__).parents[3]
LOG = ROOT / "tests" / "golden" / "megatron_logs" / "each_iteration.log"
STEPS = ROOT / "recipes" / "published" / "steps_sailor.csv.gz"
NCCL = """# nThread 1 nGpus 2 minBytes 1048576 maxBytes 1048576 step: 2(factor) warmup iters: 5
#  Rank  0 Group  0 Pid 1 on host device  0 [0x07] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid 2 on host device  1 [0x08] NVIDIA H100 80GB HBM3
#       size         count      type   redop    root     time   algbw   busbw #wrong     time
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)
     1048576        262144     float     sum      -1    50.10   20.93   20.93      0    49.80
"""
COMMAND = [
    *("torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", "--num-layers", "8", "--bf16"),
    *("--hidden-size", "1024", "--num-attention-heads", "8", "--seq-length", "1024"),
    *("--max-position-embeddings", "1024", "--vocab-size", "32000", "--micro-batch-size", "1"),
    *("--global-batch-size", "64", "--train-iters", "1000"),
]
WRITERS: Mapping[str, list[str]] = {
    "import log": ["import", "log", "IN/train.log", "--out", "OUT"],
    "import steps": ["import", "steps", str(STEPS), "--out", "OUT"],
    "csv": ["import", "nccl-tests", "IN/all_reduce_perf.log", "--out", "OUT/a.csv"],
    "packed csv": ["import", "nccl-tests", "IN/all_reduce_perf.log", "--out", "OUT/a.csv.gz"],
    "parquet": ["import", "nccl-tests", "IN/all_reduce_perf.log", "--out", "OUT/a.parquet"],
    "sbatch": ["predict", "--device", "H100", "--sbatch", "OUT/go.sbatch", "--", *COMMAND],
    "timeline": ["predict", "--device", "H100", "--timeline", "OUT/t.json.gz", "--", *COMMAND],
    "svg": ["explain", str(golden_copy("cpu_dp2")), "running", "--svg", "OUT/s.svg"],
    "script": ["plan", "--device", "H100", "--top", "1", "--write", "OUT/go.sh", "--", *COMMAND],
}


def ask(writer: str, home: Path) -> int:
    words = [word.replace("IN/", f"{home}/") for word in WRITERS[writer]]
    try:
        return main([word.replace("OUT", f"{home}/out") for word in words])
    except SystemExit as err:
        return int(err.code or 0)


def inputs(home: Path) -> Path:
    home.mkdir(parents=True, exist_ok=True)
    lines = [line for line in LOG.read_text().splitlines() if " iteration " in line]
    (home / "train.log").write_text("\n".join(lines[:60]))
    (home / "all_reduce_perf.log").write_text(NCCL)
    (home / "out").mkdir(exist_ok=True)
    return home


def put(path: Path, content: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if content == "link":
        path.symlink_to("nowhere")
    elif content == "folder":
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def seen(path: Path) -> object:
    if path.is_symlink():
        return os.readlink(path)
    return path.read_bytes() if path.is_file() else "folder"


def names_below(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Names that each writer leaves in an empty folder."""
    names = {}
    for writer in WRITERS:
        home = inputs(tmp_path_factory.mktemp("first"))
        assert ask(writer, home) == 0, writer
        names[writer] = names_below(home / "out")
        assert names[writer] and not any(name.endswith(".tmp") for name in names[writer])
    return names


CONTENTS = st.one_of(
    st.binary(max_size=99),
    st.text(max_size=99),
    st.sampled_from(["link", "folder", '{"launch_id": "mine"}', '{"schema": 1, "run_id": "x"}']),
)


@pytest.mark.slow
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_nothing_of_a_drawn_folder_is_replaced(
    written: dict[str, list[str]],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    writer = data.draw(st.sampled_from(sorted(WRITERS)))
    names = data.draw(st.sets(st.sampled_from(written[writer]), min_size=1, max_size=6))
    home = inputs(tmp_path_factory.mktemp("drawn"))
    for name in sorted(names):
        put(home / "out" / name, data.draw(CONTENTS))
    before = {name: seen(home / "out" / name) for name in names}
    ask(writer, home)
    assert {name: seen(home / "out" / name) for name in names} == before


@pytest.mark.slow
@pytest.mark.parametrize("writer", sorted(WRITERS))
def test_what_is_ours_is_written_again(writer: str, tmp_path: Path) -> None:
    """The same question into the same folder has the same answer, but for the log of a run that is
    there."""
    home = inputs(tmp_path)
    assert ask(writer, home) == 0
    assert ask(writer, home) == (2 if writer == "import log" else 0)


@pytest.mark.parametrize("writer", ["csv", "packed csv", "parquet"])
def test_a_table_of_ours_is_written_again_and_a_users_with_the_same_columns_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], writer: str
) -> None:
    home = inputs(tmp_path)
    assert ask(writer, home) == 0
    (path,) = (home / "out").iterdir()
    table = path.read_bytes()
    (home / "all_reduce_perf.log").write_text(NCCL.replace("50.10", "60.10"))
    assert ask(writer, home) == 0 and path.read_bytes() != table
    frame = read_frame(path).drop(columns="created_by")
    path.unlink()
    frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
    theirs = path.read_bytes()
    assert ask(writer, home) == 2
    assert f"{path.name}: exists and was not written by forerun" in capsys.readouterr().err
    assert path.read_bytes() == theirs


def test_an_imported_table_is_replaced_by_a_newer_one_and_never_a_users(tmp_path: Path) -> None:
    out, newer = tmp_path / "out", tmp_path / "mine.csv"
    path = out / "imported" / "mine-steps.csv"
    rows = gzip.decompress(STEPS.read_bytes()).decode().splitlines(keepends=True)
    for count in (2, 4):
        newer.write_text("".join(rows[: count + 1]))
        assert main(["import", "steps", str(newer), "--out", str(out)]) == 0
        assert is_ours(path) and len(path.read_text().splitlines()) == 1 + count
    path.write_text("".join(rows[:3]))
    assert main(["import", "steps", str(newer), "--out", str(out)]) == 2
    assert path.read_text() == "".join(rows[:3])


def test_forecasts_beside_a_users_log_are_kept_and_read(tmp_path: Path) -> None:
    from forerun.calib.forecast.evaluation import Ended

    put(tmp_path / FORECASTS, "the user's\n")
    place = Place(directory=tmp_path, launch_id="ours", run_id="r")
    end = dict.fromkeys(("last_step_unix_s", "end_unix_s"), 2e9)
    steps = dict.fromkeys(("iteration", "steps_total", "num_steps"), 9)
    append_end(place, Ended(run_id="r", num_inside={}, **end, **steps))
    assert list(read_forecasts(tmp_path).ended) == ["r"]
    assert forecasts_path(tmp_path) == tmp_path / "runs" / FORECASTS
    assert (tmp_path / FORECASTS).read_text() == "the user's\n"
