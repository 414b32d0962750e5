"""Each page of ``docs/extending`` is followed to the letter, and what it says then holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from extending_pages import PAGES, blocks, diff_size, extended, run

pytestmark = pytest.mark.nightly

MOST_FILES = 3
PATCHED = ("layout_choice.md", "megatron_argument.md", "operator_kind.md", "table_reader.md")

BARE = """
from dataclasses import replace
from forerun.calib.memory.peak import memory
from forerun.calib.workload.config import Batch, ModelShape, Parallelism, RunConfig

shape = dict(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4)
model = ModelShape(**shape, num_query_groups=4, kv_channels=16, seq_length=32, vocab_size=128)
for layers in (2, 4):
    config = RunConfig(
        model=replace(model, num_layers=layers),
        parallelism=Parallelism(),
        batch=Batch(micro_batch_size=2, global_batch_size=2),
    )
    print(int(memory(config).activations_nbytes))
"""


@pytest.mark.parametrize("page", PATCHED)
def test_a_page_asks_for_three_files_at_most(page: str) -> None:
    num_files, num_lines = diff_size(page)
    assert 0 < num_files <= MOST_FILES and num_lines < 50


def test_an_operator_kind_is_counted_priced_kept_and_timed(tmp_path: Path) -> None:
    path = extended("operator_kind.md", tmp_path / "new")
    unchanged = tmp_path / "old"
    unchanged.mkdir()
    (unchanged / "forerun").symlink_to(PAGES.parents[1])
    bare = run(BARE, unchanged).split()
    (script,) = blocks("operator_kind.md", "python")
    assert "gates timed" in run(script, path, str(tmp_path / "out"), *bare)


def test_a_switch_of_megatron_is_one_file_and_ten_lines(tmp_path: Path) -> None:
    page = "megatron_argument.md"
    num_files, num_lines = diff_size(page, num_diffs=1)
    assert num_files == 1 and num_lines <= 10
    script, _ = blocks(page, "python")
    assert run(script, extended(page, tmp_path, num_diffs=1)) == "{'qk_l2_norm'}\n"


def test_an_argument_of_megatron_has_its_effect(tmp_path: Path) -> None:
    _, script = blocks("megatron_argument.md", "python")
    assert run(script, extended("megatron_argument.md", tmp_path)) == "2 norms more\n"


def test_a_choice_of_a_layout_is_stated_told_and_read_back(tmp_path: Path) -> None:
    assert diff_size("layout_choice.md") == (1, 9)
    (script,) = blocks("layout_choice.md", "python")
    assert run(script, extended("layout_choice.md", tmp_path)) == "6 buckets more\n"


def test_a_table_of_another_source_becomes_our_own(tmp_path: Path) -> None:
    path = extended("table_reader.md", tmp_path)
    table = tmp_path / "norms.csv"
    sizes = [(rows, width) for rows in (256, 1024, 4096) for width in (512, 1024)]
    lines = [f"A100,{rows},{width},bf16,{rows * width / 1e5}" for rows, width in sizes]
    table.write_text("\n".join(["accelerator,rows,width,dtype,forward_us", *lines]) + "\n")
    convert = path / "forerun" / "benchmarks" / "published" / "convert.py"
    run(
        f"import runpy; runpy.run_path({str(convert)!r}, run_name='__main__')",
        path,
        *(str(table), "--out", str(tmp_path / "own")),
    )
    (new_file,) = (tmp_path / "own").iterdir()
    read = f"""
import pandas as pd
from forerun.calib.importers.canonical_tables import read_table
found = read_table(pd.read_csv({str(new_file)!r}), "norms")
assert set(found["kind"]) == {{"norm"}} and set(found["phase"]) == {{"forward"}}
wanted = sorted(r * w / 1e11 for r, w in {sizes})
assert [round(t, 15) for t in sorted(found["time_s"])] == [round(t, 15) for t in wanted]
"""
    run(read, path)
