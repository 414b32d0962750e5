"""Step tables: every family by its columns, no row lost, and what each column comes to."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from published_steps import GOLDEN, golden, golden_frame, modified_row, only

from forerun.benchmarks.protocols.table_steps import TableSteps
from forerun.benchmarks.published.readers import read_steps
from forerun.calib.errors import CalibrationError, ConfigError
from forerun.calib.importers import canonical_steps
from forerun.calib.importers.canonical_steps import canonical_frame
from forerun.calib.records.step_rows import StepKind, Trait
from forerun.calib.workload.config import (
    Attention,
    ContextComm,
    Dispatcher,
    Fp8Recipe,
    Precision,
    Recompute,
)

pytestmark = pytest.mark.slow

PUBLISHED = Path(__file__).parents[3] / "recipes" / "published"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.csv"))


@pytest.mark.parametrize("name", NAMES)
def test_columns_tell_the_family_in_any_order_and_no_row_is_lost(name: str) -> None:
    frame = golden_frame(name)
    one, other = read_steps(frame, "a"), read_steps(frame[frame.columns[::-1]], "b")
    assert [row.config for row in one.rows] == [row.config for row in other.rows]
    if "iteration" not in frame.columns:
        assert len(one.rows) + len(one.skipped) == len(frame)
    assert all(skip.reason for skip in one.skipped)
    assert all(row.measured_s > 0 and row.machine and row.group for row in one.usable)


@pytest.mark.parametrize("name", NAMES)
def test_our_own_format_gives_the_same_rows_back(name: str) -> None:
    rows = list(golden(name).rows)
    written = io.StringIO(canonical_frame(rows).to_csv(index=False))
    reread = canonical_steps.read_steps(pd.read_csv(written), name)
    assert not reread.skipped
    for row, back in zip(rows, reread.rows, strict=True):
        assert replace(row.config, unmodelled=()) == replace(back.config, unmodelled=())
        for field in ("machine", "group", "kind", "flag", "measured_memory_nbytes"):
            assert getattr(row, field) == getattr(back, field)
        # Before pandas 3 the last bit of a number from a file may be another.
        assert row.measured_s == pytest.approx(back.measured_s, rel=1e-15)


@pytest.mark.parametrize(
    ("name", "usable", "flagged", "skipped"),
    [
        ("e2e_sailor", 2, 1, 0),
        ("e2e_llmfoundry_mpt_fsdp", 2, 0, 0),
        ("e2e_neusight", 0, 1, 1),
        ("e2e_megatron_bridge", 6, 0, 1),
        ("e2e_mlperf_llm_systems", 1, 1, 3),
    ],
)
def test_what_is_not_modelled_is_flagged_or_skipped(
    name: str, usable: int, flagged: int, skipped: int
) -> None:
    table = golden(name)
    assert len(table.usable) == usable
    assert len(table.rows) - len(table.usable) == flagged
    assert len(table.skipped) == skipped


def test_llm_foundry_shards_all_and_reduces_in_the_precision_of_its_mode() -> None:
    name = "e2e_llmfoundry_mpt_fsdp"
    pure, default = (only(modified_row(name, mp_mode=mode)).config for mode in ("PURE", "DEFAULT"))
    assert pure.parallelism.shards_weights and pure.parallelism.shards_grads
    assert pure.reduces_grads_in_bf16 and not default.reduces_grads_in_bf16
    recomputed = only(modified_row(name, recompute_full=True)).config
    assert recomputed.recompute is Recompute.FULL
    grad_op_layout = only(modified_row(name, sharding="SHARD_GRAD_OP")).config.parallelism
    assert grad_op_layout.shards_weights and not grad_op_layout.regathers_weights
    assert "HYBRID" in modified_row(name, sharding="HYBRID").skipped[0].reason


def test_vtrain_cuts_the_vocabulary_on_one_node_and_pads_it_on_a_cluster() -> None:
    single = golden("e2e_vtrain_single_node").rows
    assert {row.kind for row in single} == {StepKind.SYNTHETIC}
    for row in single:
        tp, vocab = row.config.parallelism.tp, row.config.model.vocab_size
        assert 50257 - tp < vocab <= 50257 and vocab % tp == 0
    row = golden("e2e_vtrain_multi_node").rows[0]
    config = row.config
    assert row.kind is StepKind.MEASURED and row.measured_s == pytest.approx(9.6036)
    assert config.model.vocab_size == 51200 and config.recompute is Recompute.FULL
    assert config.precision is Precision.FP16 and config.attention is Attention.UNFUSED
    assert (config.parallelism.tp, config.parallelism.dp, config.num_microbatches) == (8, 32, 4)


def test_simumax_with_experts_latent_attention_and_long_sequences() -> None:
    name = "e2e_simumax_b200_8gpu"
    cells: Mapping[str, Any] = {
        "model": "deepseekv3 (layer-cut)",
        "layers": 4,
        "hidden": 7168,
        "heads": 128,
        "kv_heads": 128,
        "vocab": 129280,
        "ep": 4,
    }
    model = only(modified_row(name, **cells)).config.model
    assert model.experts is not None and model.latent_attention is not None
    assert model.experts.layer_pattern == (False, True, True, True)
    assert (model.experts.num_experts, model.experts.top_k) == (256, 8)
    assert model.experts.capacity_factor == 1 and model.experts.is_padded_to_capacity
    assert model.experts.dispatcher is Dispatcher.ALL_TO_ALL
    long = only(modified_row(name, tp=2, pp=1, dp=1, cp=4, seq_len=131072, global_batch_size=4))
    par = long.config.parallelism
    assert (par.cp, par.context_comm) == (4, ContextComm.ALL_TO_ALL)
    assert long.config.local_seq_length == 32768 and long.config.num_microbatches == 4
    assert long.measured_memory_nbytes == pytest.approx(66.55 * 2**30)


def test_sailor_counts_embedding_and_head_as_layers() -> None:
    row = golden("e2e_sailor").rows[1]
    assert row.config.parallelism.chunk_layers == (4, 7, 7, 6)
    assert row.config.parallelism.ranks_per_node == 4
    assert row.config.model.vocab_size == 50688  # 50272 up to a multiple of 128 x tp 4
    mixed = modified_row("e2e_sailor", gpus_types="V100|A100")
    assert "one kind of device" in mixed.skipped[0].reason


def test_dgxc_reads_degrees_virtual_stages_and_precision() -> None:
    table = golden("e2e_dgxc_scaling")
    assert "accumulation" in table.skipped[0].reason
    config = table.rows[0].config
    par = config.parallelism
    assert (par.tp, par.pp, par.cp, par.vp) == (4, 4, 2, 5)
    assert config.chunk_layers == (4,) * 20 and config.parallelism.is_sequence_parallel
    assert (
        only(modified_row("e2e_dgxc_scaling", 1, precision="FP8")).config.fp8 is Fp8Recipe.DELAYED
    )
    other = modified_row("e2e_dgxc_scaling", 1, framework="MaxText")
    assert "MaxText" in other.skipped[0].reason


def test_a_degree_that_is_left_blank_is_named_and_never_filled_in() -> None:
    for name, column in (
        ("e2e_dgxc_scaling", "cp"),
        ("e2e_mlperf_llm_systems", "pp"),
        ("e2e_small_tables", "tp"),
        ("e2e_sailor", "tp"),
    ):
        (skipped,) = modified_row(
            name, 2 if name == "e2e_dgxc_scaling" else 0, **{column: None}
        ).skipped
        assert f"{column} not stated" in skipped.reason or f"{column} ''" in skipped.reason
    pipeline = modified_row("e2e_mlperf_llm_systems", 4, vp=None).skipped[0].reason
    assert pipeline.startswith("vp not stated")
    lora = modified_row("e2e_mlperf_llm_systems", 3, tp=None, cp=None).skipped[0].reason
    assert lora.startswith("LoRA is not modelled; tp, cp not stated")
    assert (
        "Gaudi"
        in modified_row("e2e_mlperf_llm_systems", accelerator="Intel Gaudi2").skipped[0].reason
    )
    tuned = golden("e2e_dgxc_scaling").skipped[0].reason
    assert tuned.startswith("LoRA is not modelled; fine-tuning; neither micro-batch")
    experts = modified_row("e2e_megatron_bridge", model="Kimi_K2", tp=1, pp=1, vp=None, ep=None)
    assert "ep not stated" in experts.skipped[0].reason


def test_a_pipeline_of_mlperf_without_its_vp_is_left_out() -> None:
    (result,) = golden("e2e_mlperf_llm_systems").usable
    assert result.config.parallelism.vp == 4
    blank = modified_row("e2e_mlperf_llm_systems", pp=8.0, vp=None)
    assert "vp not stated" in blank.skipped[0].reason
    assert only(modified_row("e2e_mlperf_llm_systems", vp=6.0)).config.parallelism.vp == 6


def test_recompute_that_is_none_is_not_recompute_that_is_blank() -> None:
    name, cells = "e2e_small_tables", {"fsdp": None, "step_time_s": 1.0}
    assert not only(modified_row(name, 1, **cells, recompute="none")).flag
    assert (
        only(modified_row(name, 1, **cells, recompute=None)).flag == "the recompute is not stated"
    )


def test_papers_before_flash_attention_are_unfused() -> None:
    table = golden("e2e_small_tables")
    by_source = {row.config.framework[:4]: row.config for row in table.rows}
    assert by_source["Kort"].attention is Attention.UNFUSED
    assert by_source["torc"].attention is Attention.FUSED
    rows = [row for row in table.rows if "Korthikanti" in row.machine]
    assert {row.config.recompute for row in rows} == {Recompute.FULL, Recompute.SELECTIVE}
    assert any("micro-batch is not stated" in row.flag for row in table.rows)
    zero = modified_row(
        "e2e_small_tables", 1, note="ZeRO-3", tp=1, pp=1, vp=1, global_batch_size=32
    )
    assert not zero.rows and "ZeRO as DeepSpeed" in zero.skipped[0].reason


def test_rows_older_than_flash_attention_2_say_so_and_are_slower() -> None:
    fsdp = "e2e_llmfoundry_mpt_fsdp"
    row = only(modified_row(fsdp, gpu="a100_80gb"))
    assert Trait.FIRST_FLASH in row.traits
    newer = replace(row, traits=row.traits - {Trait.FIRST_FLASH})
    slow, fast = (TableSteps().fit([]).predict([one]).time_s[0] for one in (row, newer))
    assert slow > 1.005 * fast
    assert Trait.FIRST_FLASH not in only(modified_row(fsdp, gpu="h100_80gb")).traits
    torchtitan = [row for row in golden("e2e_small_tables").rows if "torchtitan" in row.machine]
    assert torchtitan and not any(Trait.FIRST_FLASH in row.traits for row in torchtitan)


def test_bigscience_reads_sizes_by_label_or_by_columns() -> None:
    table = golden("e2e_bigscience_v100")
    row = next(row for row in table.usable if row.config.model.hidden_size == 8192)
    assert row.config.parallelism.tp == 4 and row.config.model.num_layers == 64
    cells = {"hidden": 14336, "layers": 72, "heads": 112, "gpu": "A100-80GB", "tp": 4, "pp": 12}
    wide = only(
        modified_row("e2e_bigscience_v100", **cells, gpus=384, micro_batch=2, global_batch=2048)
    )
    assert wide.config.parallelism.dp == 8 and wide.config.model.seq_length == 2048
    oom = modified_row("e2e_bigscience_v100", oom=True)
    assert "out of memory" in oom.rows[0].flag


def test_logs_become_one_row_each_without_their_first_iteration() -> None:
    frame = golden_frame("e2e_bigscience_v100_log_iterations")
    table = read_steps(frame, "logs")
    assert len(table.rows) + len(table.skipped) == frame["source_file"].nunique()
    row = next(row for row in table.rows if "ds-off" in row.row_id)
    times_ms = frame.loc[frame["source_file"] == row.row_id, "step_time_ms"].iloc[1:]
    assert row.measured_s == pytest.approx(times_ms.median() / 1000)


def test_ci_reads_megatrons_own_names() -> None:
    table = golden("e2e_mcore_ci_golden")
    assert any("'t5' is no GPT" in skip.reason for skip in table.skipped)
    cells = {"num_layers_per_virtual_pipeline_stage": 1, "pipeline_model_parallel_size": 2}
    cells |= {"tensor_model_parallel_size": 4, "num_layers": 12, "global_batch_size": 32}
    virtual = only(modified_row("e2e_mcore_ci_golden", 0, **cells)).config
    assert (virtual.parallelism.vp, virtual.chunk_layers) == (6, (1,) * 12)
    assert any(row.config.model.experts for row in table.rows)


def test_nanotron_columns() -> None:
    cells = {"model": "llama-1B (bench)", "gpus": 16, "dp": 4, "tp": 2, "pp": 2, "seq_len": 4096}
    batch = {"micro_batch_size": 2, "grad_accum": 16, "global_batch_size": 128}
    frame = pd.DataFrame([cells | batch | {"step_time_ms_median_it8_12": 2000.0, "flag": None}])
    row = only(read_steps(frame, "n"))
    assert row.measured_s == 2 and row.config.num_microbatches == 16


def test_our_format_takes_megatrons_arguments() -> None:
    cells = {
        "step_time_s": 1.5,
        "num_layers": 6,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "seq_length": 2048,
        "vocab_size": 50257,
        "micro_batch_size": 2,
        "global_batch_size": 64,
        "world_size": 8,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "decoder_first_pipeline_num_layers": 2,
        "num_experts": 8,
        "expert_model_parallel_size": 2,
        "traits": "parallel_residual late_gathers",
        "bf16": True,
        "device": "H100",
    }
    row = only(read_steps(pd.DataFrame([cells]), "own"))
    assert row.config.chunk_layers == (2, 4) and row.config.parallelism.dp == 2
    assert row.traits == {Trait.PARALLEL_RESIDUAL, Trait.LATE_GATHERS}
    assert row.machine == "H100 bf16" and row.config.model.vocab_size == 50432
    wrong = read_steps(pd.DataFrame([cells | {"kind": "guessed"}]), "own")
    assert "guessed" in wrong.skipped[0].reason and "measured" in wrong.skipped[0].reason
    missing = read_steps(pd.DataFrame([cells | {"hidden_size": None}]), "own")
    assert "hidden_size" in missing.skipped[0].reason


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("steps_*")), ids=lambda path: path.name)
def test_what_ships_is_read_without_a_skip(path: Path) -> None:
    table = read_steps(pd.read_csv(path, low_memory=False), path.name)
    assert table.usable and not table.skipped


def test_unknown_columns_name_the_nearest_family_and_empty_tables_say_so() -> None:
    frame = golden_frame("e2e_sailor").rename(columns={"gpus_types": "gpu_types"})
    with pytest.raises(ConfigError, match=r"Sailor.*gpus_types \(is gpu_types meant\?\)"):
        read_steps(frame, "t")
    with pytest.raises(CalibrationError, match="no rows"):
        read_steps(golden_frame("e2e_sailor").iloc[:0], "t")
