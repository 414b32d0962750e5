"""``forerun validate`` as a shell sees it, on the example tables that ship with the format."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from forerun.calib.fit.operator_kinds import KINDS
from forerun.launch.cli import ExitCode, main

PUBLISHED = Path(__file__).parents[2] / "recipes" / "published"
OPERATORS = PUBLISHED / "example_operators.csv"
COLLECTIVES = PUBLISHED / "example_collectives.csv"
GOLDEN = Path(__file__).parents[1] / "golden" / "published"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["validate", *argv])
    out = capsys.readouterr()
    return code, out.out, out.err


def results(text: str) -> list[dict[str, object]]:
    value = json.loads(text)
    assert value["schema"] == 1
    return value["results"]


def test_operators_are_scored_in_both_phases(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("operators", str(OPERATORS), "--json", "--protocol", "random", "--seeds", "2")
    code, out, err = run(capsys, *argv)
    rows = results(out)
    assert code == ExitCode.ANSWER and not err
    assert [row["group"] for row in rows] == [
        *("all", "layernorm/forward", "layernorm/backward", "linear1/forward", "linear1/backward")
    ]
    assert {row["table"] for row in rows} == {OPERATORS.name}
    assert rows[0]["n"] == sum(int(str(row["n"])) for row in rows[1:]) == 4 * 2 * 5
    assert all(float(str(row["mape_frac"])) < 0.3 for row in rows)
    assert run(capsys, *argv)[1] == out


def test_collectives_are_scored(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "collectives", str(COLLECTIVES), "--json", "--seeds", "1")
    rows = results(out)
    assert code == ExitCode.ANSWER
    assert {"random", "leave_span"} == {row["protocol"] for row in rows}
    assert {row["group"] for row in rows} == {"all", "all_reduce", "all_gather", "send"}


def test_a_cluster_file_states_the_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("collectives", str(COLLECTIVES), "--json", "--protocol", "leave_span")
    cluster = tmp_path / "cluster.json"
    cluster.write_text('{"node_bytes_per_s": 1e9, "joint": "pcie"}')
    usual, stated = (run(capsys, *argv, *more) for more in ((), ("--cluster", str(cluster))))
    assert usual[0] == stated[0] == ExitCode.ANSWER and usual[1] != stated[1]
    cluster.write_text('{"num_cards": "many"}')
    code, _, err = run(capsys, *argv, "--cluster", str(cluster))
    assert code != ExitCode.ANSWER and "num_cards" in err
    code, _, err = run(capsys, *argv, "--cluster", str(tmp_path / "none.json"))
    assert code != ExitCode.ANSWER and "none.json" in err


def test_parquet_and_gzip_give_the_same_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pd.read_csv(COLLECTIVES)
    frame.to_parquet(tmp_path / "t.parquet")
    frame.to_csv(tmp_path / "t.csv.gz", index=False)
    figures = []
    for name in ("t.parquet", "t.csv.gz"):
        _, out, _ = run(
            capsys, "collectives", str(tmp_path / name), "--json", "--protocol", "leave_span"
        )
        figures.append([{k: v for k, v in r.items() if k != "table"} for r in results(out)])
    assert figures[0] == figures[1] and figures[0]


def test_text_shows_noise_beside_the_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = pd.read_csv(OPERATORS)
    twice = pd.concat([once, once.assign(time_s=1.1 * once["time_s"])])
    twice.to_csv(tmp_path / "t.csv", index=False)
    argv = ("--protocol", "random", "--seeds", "1")
    code, out, _ = run(capsys, "operators", str(tmp_path / "t.csv"), *argv)
    assert code == ExitCode.ANSWER
    (line,) = (line for line in out.splitlines() if line.startswith("linear1/backward"))
    assert "random" in out and "noise" in out and line.split()[-1] == "4.8"


def test_a_protocol_that_cannot_be_carried_is_left_out_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pd.read_csv(OPERATORS).assign(tp=None)
    frame.to_csv(tmp_path / "t.csv", index=False)
    code, out, err = run(capsys, "operators", str(tmp_path / "t.csv"), "--json", "--seeds", "1")
    assert code == ExitCode.ANSWER
    assert {row["protocol"] for row in results(out)} == {"random"}
    assert err.count("\n") == 1 and "leave_tp" in err and "two tensor-parallel degrees" in err


def test_flagged_rows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = pd.read_csv(COLLECTIVES)
    frame["flag"] = ["copied" if i % 8 == 0 else None for i in frame.index]
    frame.to_csv(tmp_path / "t.csv", index=False)
    _, _, err = run(
        capsys, "collectives", str(tmp_path / "t.csv"), "--json", "--protocol", "leave_span"
    )
    assert "5 of 40 rows flagged" in err and "copied" in err


def test_implausible_rows_are_counted_and_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pd.read_csv(OPERATORS)
    backward = frame.index[(frame["group"] == "linear1") & (frame["phase"] == "backward")]
    frame.loc[backward[:6], "time_s"] *= 0.1
    frame.to_csv(tmp_path / "t.csv", index=False)
    argv = ("operators", str(tmp_path / "t.csv"), "--json", "--protocol", "random", "--seeds", "1")
    _, out, err = run(capsys, *argv)
    assert "6 rows of linear1/backward train no model: backward shorter than possible" in err
    assert results(out)[0]["n"] == 4 * 5


@pytest.mark.parametrize(
    ("what", "file", "code", "part"),
    [
        ("operators", COLLECTIVES, ExitCode.USAGE, "holds collectives"),
        ("collectives", OPERATORS, ExitCode.USAGE, "holds operators"),
        ("operators", PUBLISHED / "FORMAT.md", ExitCode.USAGE, ".parquet"),
        ("operators", PUBLISHED / "none.csv", ExitCode.USAGE, "does not exist"),
        ("operators", GOLDEN / "ops_aic_gemm_fp8.csv", ExitCode.USAGE, "convert.py"),
    ],
)
def test_a_wrong_file_is_one_line(
    what: str, file: Path, code: int, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    number, out, err = run(capsys, what, str(file), "--protocol", "random")
    assert (number, out) == (code, "")
    assert part in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "code", "part"),
    [
        ("gpu,op,dtype,msec\nA,mm,fp16,1\n", ExitCode.USAGE, "t.csv"),
        ("", ExitCode.NO_DATA, "no rows"),
        ("gpu,op,batch,m,n,k,time_us\n", ExitCode.USAGE, "also needs"),
    ],
)
def test_a_table_that_says_nothing_is_one_line(
    text: str, code: int, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    number, _, err = run(capsys, "operators", str(path))
    assert number == code and part in err and err.count("\n") == 1


def test_a_table_with_few_rows_carries_no_protocol(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pd.read_csv(OPERATORS).head(3).to_csv(tmp_path / "t.csv", index=False)
    code, out, err = run(capsys, "operators", str(tmp_path / "t.csv"))
    assert (code, out) == (ExitCode.NO_DATA, "") and "no protocol" in err.splitlines()[-1]


def test_unknown_protocols_and_seeds_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "operators", str(OPERATORS), "--protocol", "leave_span")
    assert code == ExitCode.USAGE and "leave_tp" in err
    code, _, err = run(capsys, "operators", str(OPERATORS), "--seeds", "0")
    assert code == ExitCode.USAGE and "--seeds 0" in err


def test_the_format_names_every_kind_with_its_sizes() -> None:
    lines = (PUBLISHED / "FORMAT.md").read_text().splitlines()
    rows = [line.split("|")[1:3] for line in lines if line.startswith("| `")]
    sizes = {
        kind.strip(" `"): text.split("(")[0].split(":")[0]
        for kinds, text in rows
        for kind in kinds.split(",")
    }
    for kind, num in ((k, law.num_sizes) for k, law in KINDS.items() if law.num_sizes):
        text = sizes[kind.value]
        assert text.count(",") + 1 == num, kind
