"""Reports by training itself: folders of real writers, and who reports to the TrainJob."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.hooks.control.companion_link import companion_environment
from forerun.hooks.control.live import companion_settings, event_folder, reports_to_trainjob
from forerun.hooks.process.settings import RankInfo, Settings

KUBEFLOW = {f"KUBEFLOW_TRAINER_SERVER_{end}": end for end in ("URL", "CA_CERT", "TOKEN")}


def test_without_a_writer_there_is_no_folder() -> None:
    assert event_folder() == ""


@pytest.fixture(scope="module")
def imported() -> None:
    """Their imports leave finders behind, which are no test's."""
    for name in ("tensorboard", "torch.utils.tensorboard", "transformers.trainer"):
        pytest.importorskip(name)


@pytest.mark.slow
def test_the_folder_is_that_of_torchs_writer_while_it_is_open(
    imported: None, tmp_path: Path
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path / "events"))
    rank = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, run_id="r")
    companion = companion_settings(Settings(rank=rank), has_host_wandb=False)
    assert event_folder() == companion.host_tensorboard == str(tmp_path / "events")
    writer.close()
    assert event_folder() == ""


@pytest.mark.slow
def test_the_trainer_has_its_writer_when_training_begins(imported: None, tmp_path: Path) -> None:
    from tiny_llama import tiny_data, tiny_llama
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Looks(TrainerCallback):
        folder = ""

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.folder = event_folder()

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to="tensorboard",
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(tiny_llama(), arguments, None, tiny_data())
    looks = Looks()
    trainer.add_callback(looks)
    trainer.train()
    assert Path(looks.folder).parent == tmp_path / "runs"
    assert list(Path(looks.folder).glob("events.out.tfevents.*"))


@pytest.mark.parametrize(
    ("modules", "environ", "is_reporting"),
    [
        ({}, {}, False),
        ({"kubeflow.trainer": {}}, {}, True),
        ({"transformers.integrations.integration_utils": {"KubeflowCallback": 1}}, {}, False),
        ({"transformers.trainer": {}, "transformers.integrations.integration_utils": {}}, {},
         False),
        ({"transformers.trainer": {},
          "transformers.integrations.integration_utils": {"KubeflowCallback": 1}}, {}, True),
        ({"transformers.trainer": {},
          "transformers.integrations.integration_utils": {"KubeflowCallback": 1}},
         {"DISABLE_KUBEFLOW_INTEGRATION": "TRUE"}, False),
    ],
)  # fmt: skip
def test_who_reports_to_the_trainjob(
    modules: dict[str, dict[str, int]],
    environ: dict[str, str],
    is_reporting: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("kubeflow.trainer", "transformers.trainer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, attributes in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**attributes))  # type: ignore[arg-type]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert reports_to_trainjob() == is_reporting


def test_the_companion_has_what_kubeflow_tells_a_pod() -> None:
    given = {**KUBEFLOW, "RANK": "0", "SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "r"}
    result = companion_environment(given)
    assert result.items() >= {**KUBEFLOW, "SLURM_JOB_ID": "7"}.items()
    assert "RANK" not in result and "TORCHELASTIC_RUN_ID" not in result
