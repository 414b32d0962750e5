"""Memory in published rows: which runs fit, which ran out, and which do not report it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from published_steps import modified_row

from forerun.benchmarks.published.memory_rows import by_table, capacity_nbytes, memory_rows
from forerun.calib.memory.peak import memory
from forerun.calib.units import GIB
from forerun.calib.workload.config import Engine, Recompute

GOLDEN = Path(__file__).parents[2] / "golden" / "steps"
CARD = {
    **{"row_id": "card", "system": "DGX-H100", "model": "Qwen3_30B_a3B", "precision": "BF16"},
    **{"gpus": 16, "global_batch": 64, "micro_batch": 1, "seq_len": 4096, "tp": 2, "pp": 1},
    **{"cp": 1, "ep": 8, "num_layers": 48, "hidden_size": 2048, "ffn_hidden_size": 6144},
    **{"num_attention_heads": 32, "num_query_groups": 4, "kv_channels": 128, "vocab_size": 151936},
    **{"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "mtp_num_layers": 0},
    **{"peak_memory_gb": 60.0, "recompute_granularity": "selective", "recompute_modules": "[]"},
}


@pytest.mark.parametrize(
    ("device", "gib"),
    [("a100_40gb", 39.4), ("A100-SXM-80GB (Selene)", 79.2), ("H100-96GB-HBM2e-500W", 94.5)],
)
def test_a_device_has_the_memory_that_its_name_says(device: str, gib: float) -> None:
    assert capacity_nbytes(device) == pytest.approx(gib * GIB)
    assert capacity_nbytes("A100 (DGX-A100)") is None


def test_timed_rows_ran_and_cards_say_who_ran_out(tmp_path: Path) -> None:
    name = "e2e_llmfoundry_mpt_fsdp"
    pd.read_csv(GOLDEN / f"{name}.csv").to_csv(tmp_path / f"{name}.csv.gz", index=False)
    others = ({"oom": "OOM_iteration_1"}, {"lora_dim": 8}, {"micro_batch": None})
    cards = pd.DataFrame([CARD, *({**CARD, **cells} for cells in others)])
    cards.to_csv(tmp_path / "e2e_bridge_cards.csv.gz", index=False)
    rows, excluded_counts = memory_rows(tmp_path)
    result = dict(by_table(rows))
    assert [row.ran for row in result[name]] == [True, True]
    assert [row.ran for row in result["e2e_bridge_cards"]] == [True, False]
    assert excluded_counts == {
        "e2e_bridge_cards: LoRA is not modelled": 1,
        "e2e_bridge_cards: micro_batch not stated": 1,
    }
    card, ran_out = result["e2e_bridge_cards"]
    assert card.peak_nbytes == 60 * GIB and card.config.parallelism.ep == 8
    # It was cut short.
    assert ran_out.peak_nbytes is None
    # An empty list of modules recomputes nothing.
    assert card.config.recompute is Recompute.NONE
    experts = card.config.model.experts
    assert experts is not None and (experts.num_experts, experts.top_k) == (128, 8)


def test_a_peak_is_held_against_what_its_source_measures(tmp_path: Path) -> None:
    for name in ("e2e_small_tables", "e2e_sailor", "e2e_bigscience_v100"):
        pd.read_csv(GOLDEN / f"{name}.csv").to_csv(tmp_path / f"{name}.csv.gz", index=False)
    result = dict(by_table(memory_rows(tmp_path)[0]))
    (titan, *_) = [row for row in result["e2e_small_tables"] if row.peak_nbytes]
    estimate = memory(titan.config)
    assert titan.config.parallelism.engine is Engine.TORCH and titan.peak_nbytes
    assert titan.error_frac(estimate) == estimate.reserved_nbytes / titan.peak_nbytes - 1
    assert abs(titan.error_frac(estimate)) < 0.02
    (device, *_) = [row for row in result["e2e_sailor"] if row.peak_nbytes]
    assert device.peak_nbytes
    whole = memory(device.config).device_nbytes / device.peak_nbytes - 1
    assert device.error_frac(memory(device.config)) == pytest.approx(whole)
    assert estimate.allocated_nbytes < estimate.reserved_nbytes < estimate.device_nbytes


def test_runs_with_zero_are_left_out_by_name() -> None:
    cells = {"pp": None, "tp": None, "gpus": 64, "size_label": "52B", "oom": False}
    cells |= {"micro_batch": 4, "global_batch": 256, "section": "HF"}
    table = modified_row("e2e_bigscience_v100", 1, **cells, zero=3.0)
    assert not table.rows and "ZeRO or offload" in table.skipped[0].reason
    table = modified_row("e2e_bigscience_v100", 1, **cells | {"tp": 1, "pp": 1}, zero=2.0)
    assert not table.rows and "DeepSpeed's" in table.skipped[0].reason
