"""Launch lines against what torchrun, Megatron, Hydra and the Trainer take, and against a shell."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace

import pytest

from forerun.calib.arguments.launch_lines import PATHS, HostKind, LaunchLine, launch_line
from forerun.calib.arguments.launch_words import phrases, plain, with_blanks
from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.records.run_values import Launch
from forerun.calib.workload.config import (
    Batch,
    ModelShape,
    Parallelism,
    Recompute,
    RunConfig,
    Sharding,
)

GPT = ModelShape(
    num_layers=8,
    hidden_size=64,
    ffn_hidden_size=256,
    num_attention_heads=8,
    num_query_groups=8,
    kv_channels=8,
    seq_length=64,
    vocab_size=1024,
)
HERE = RunConfig(
    model=GPT,
    parallelism=Parallelism(dp=8, ranks_per_node=8),
    batch=Batch(micro_batch_size=1, global_batch_size=32),
    device="NVIDIA H100 80GB HBM3",
    framework="megatron-core 0.16.1",
)
SIZES = (
    *("--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "8"),
    *("--seq-length", "64", "--vocab-size", "1000", "--attention-dropout", "0"),
    *("--hidden-dropout", "0", "--eval-iters", "0"),
)


Layout = Callable[..., RunConfig]


def launched(*argv: str, launcher: tuple[str, ...] = ("torchrun", "--nproc-per-node=8")) -> Launch:
    return Launch(argv=argv, launcher=launcher, ranks_per_node=8)


def megatron(config: RunConfig, *options: str) -> LaunchLine:
    words = ("t.py", *SIZES, "--micro-batch-size", "1", "--global-batch-size", "32", *options)
    return launch_line(launched(*words), HERE, config)


def words_of(line: LaunchLine) -> list[str]:
    return [word.text for phrase in line.phrases for word in phrase.words]


def test_the_running_layout_is_launched_as_it_was() -> None:
    line = megatron(HERE, "--lr", "1e-4")
    assert not any(line.is_new) and line.changes == () and line.diff("row 1") == []
    assert line.command.startswith("torchrun --nproc-per-node=8 t.py --num-layers 8")


def test_more_nodes_meet_where_the_user_says() -> None:
    line = megatron(replace(HERE, parallelism=Parallelism(dp=16, ranks_per_node=8)))
    assert "--nproc-per-node=8 --nnodes 2 --rdzv-backend c10d --rdzv-id forerun" in line.command
    assert '--rdzv-endpoint "${MASTER_ADDR:?the address of the first node}":29500' in line.command
    assert [blank.name for blank in line.blanks] == ["MASTER_ADDR"]


def test_a_rendezvous_of_the_user_s_own_stays() -> None:
    launcher = (
        "torchrun",
        "--nnodes=2",
        "--nproc_per_node=8",
        "--rdzv_endpoint=n0:1",
        "--rdzv_id=7",
    )
    launch = replace(launched("t.py", *SIZES, launcher=launcher), num_nodes=2)
    running = replace(HERE, parallelism=Parallelism(dp=16, ranks_per_node=8))
    more = replace(HERE, parallelism=Parallelism(dp=32, ranks_per_node=8))
    line = launch_line(launch, running, more)
    assert line.command.startswith("torchrun --nnodes=4 --nproc_per_node=8 --rdzv_endpoint=n0:1")
    assert line.blanks == ()
    alone = launch_line(launch, running, HERE)
    assert alone.command.startswith("torchrun --nnodes=1 --nproc_per_node=8 t.py")


def test_the_number_of_a_node_is_not_the_one_that_was_noted() -> None:
    launcher = ("torchrun", "--nnodes", "2", "--nproc-per-node", "8", "--node-rank", "0")
    launcher += ("--master-addr", "10.0.0.1")
    launch = replace(launched("t.py", launcher=launcher), num_nodes=2)
    running = replace(HERE, parallelism=Parallelism(dp=16, ranks_per_node=8))
    line = launch_line(launch, running, running)
    assert [blank.name for blank in line.blanks] == ["NODE_RANK"]
    assert "--master-addr 10.0.0.1" in line.command


def test_accelerate_is_told_in_its_own_words() -> None:
    launcher = ("python", "/bin/accelerate", "launch", "--num_processes", "8")
    running = replace(HERE, framework="transformers 5.23")
    wanted = replace(running, parallelism=Parallelism(dp=16, ranks_per_node=8))
    line = launch_line(launched("t.py", launcher=launcher), running, wanted)
    assert line.command.startswith("/bin/accelerate launch --num_processes 16 --num_machines 2")
    assert {blank.name for blank in line.blanks} == {"MASTER_ADDR", "NODE_RANK"}


def test_ranks_of_an_unknown_launcher_are_started_by_torchrun() -> None:
    line = launch_line(launched("t.py", launcher=()), HERE, HERE)
    assert line.command.startswith("torchrun --standalone --nproc-per-node 8 t.py")
    assert any("torchrun" in note for note in line.notes)


def test_options_of_torchrun_stay_before_a_module_that_reads_the_rest() -> None:
    launcher = (
        "python",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=8",
        "-m",
        "forerun.launch",
    )
    wanted = replace(HERE, parallelism=Parallelism(dp=16, ranks_per_node=8))
    line = launch_line(launched("t.py", launcher=launcher), HERE, wanted)
    assert line.command.startswith("python -m torch.distributed.run --nproc-per-node=8 --nnodes 2")
    assert '":29500 -m forerun.launch t.py' in line.command


def test_without_any_launch_the_script_is_a_blank() -> None:
    line = launch_line(Launch(), HERE, replace(HERE, parallelism=Parallelism(tp=8)))
    assert '"${SCRIPT:?' in line.command and "--tensor-model-parallel-size 8" in line.command


def test_changes_are_those_between_the_layouts() -> None:
    """Degrees, messages that tp asks for, and nothing else."""
    par = Parallelism(tp=2, pp=2, vp=2, dp=2, ranks_per_node=8, is_sequence_parallel=True)
    batch = Batch(micro_batch_size=2, global_batch_size=32)
    line = megatron(replace(HERE, parallelism=par, batch=batch), "--lr", "1e-4")
    changed = {c.after: c.before for c in line.changes}
    assert changed == {
        "CUDA_DEVICE_MAX_CONNECTIONS=1": "",
        "--micro-batch-size 2": "--micro-batch-size 1",
        "--tensor-model-parallel-size 2": "",
        "--pipeline-model-parallel-size 2": "",
        "--num-layers-per-virtual-pipeline-stage 2": "",
        "--sequence-parallel": "",
    }
    new = [p.shell for p, is_new in zip(line.phrases, line.is_new, strict=True) if is_new]
    assert set(new) == set(changed)
    diff = line.diff("row 3")
    assert diff[:2] == ["--- running", "+++ row 3"]
    assert {one[1:] for one in diff[2:] if one.startswith("+")} == set(changed)


def test_words_that_stand_several_times_are_counted() -> None:
    line = megatron(HERE)
    thrice = phrases(plain(("--again",) * 3))
    longer = replace(line, program=(*line.program, *thrice))
    assert longer.is_new[-3:] == (True, True, True)
    assert [(one.before, one.after) for one in longer.changes] == [("", "--again --again --again")]
    known = replace(longer, running=(*line.running, *thrice[:2]))
    assert known.is_new[-3:] == (False, False, True)
    assert sum(known.is_new) == 1


def test_the_line_says_the_layout_back() -> None:
    par = Parallelism(tp=2, pp=4, dp=1, chunk_layers=(3, 2, 2, 1), ranks_per_node=8)
    wanted = replace(HERE, parallelism=par, recompute=Recompute.FULL)
    line = megatron(wanted)
    config = config_from_command([*words_of(line)[1:]]).config
    assert (config.parallelism, config.recompute) == (par, Recompute.FULL)


def test_fsdp_asks_for_its_checkpoints_and_for_more_than_one_queue() -> None:
    """Rules of core 0.16.1: ``--ckpt-format fsdp_dtensor``, and connections other than 1."""
    par = Parallelism(
        dp=8, ranks_per_node=8, is_optimizer_distributed=True, sharding=Sharding.WEIGHTS
    )
    launch = replace(launched("t.py", *SIZES), environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    line = launch_line(launch, HERE, replace(HERE, parallelism=par))
    assert line.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert "--ckpt-format fsdp_dtensor" in line.command
    back = launch_line(
        replace(launch, argv=(*words_of(line)[3:],)), replace(HERE, parallelism=par), HERE
    )
    assert "--ckpt-format torch_dist" in back.command and "--use-megatron-fsdp" not in back.command


def test_a_masked_word_is_asked_for_and_never_made_up() -> None:
    """A shell stops where a variable is not set, and passes the user's value where it is."""
    words = with_blanks(["printf", "%s", "--hub-token", "***", "--url", "https://***@h/$x"])
    line = " ".join(word.shell for word in words).replace("printf %s", "printf '<%s>'")
    stopped = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert stopped.returncode != 0 and "the value of --hub-token" in stopped.stderr
    environ = {"PATH": "/usr/bin:/bin", "ARG_HUB_TOKEN": "a b", "ARG_URL": "me:pw"}
    passed = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=environ)
    assert passed.stdout == "<--hub-token><a b><--url><https://me:pw@h/$x>"


def test_a_shell_reads_the_words_back() -> None:
    argv = ["t.py", "--moe-layer-freq", "([0]*3+[1]*5)", "--pipeline-model-parallel-layout"]
    argv += ["Et*3|t*2|t*2|tmL", "--note", "it's $HOME `x`"]
    line = " ".join(phrase.shell for phrase in phrases(plain(argv)))
    assert shlex.split(line) == argv


def test_a_recipe_of_bridge_takes_overrides() -> None:
    words = ("run_recipe.py", "--recipe", "x", "train.micro_batch_size=1", "dataset.blend=[a]")
    wanted = replace(
        HERE,
        parallelism=Parallelism(
            tp=2, pp=2, dp=2, ranks_per_node=8, chunk_layers=(5, 3), is_optimizer_distributed=True
        ),
        batch=Batch(micro_batch_size=2, global_batch_size=32),
        recompute=Recompute.SELECTIVE,
        recompute_modules=("mlp", "layernorm"),
    )
    line = launch_line(launched(*words), HERE, wanted)
    assert line.host is HostKind.BRIDGE
    assert words_of(line)[3:8] == [
        *("run_recipe.py", "--recipe", "x", "train.micro_batch_size=2", "dataset.blend=[a]")
    ]
    results = set(words_of(line))
    assert {
        "train.micro_batch_size=2",
        "model.pipeline_model_parallel_size=2",
        "model.pipeline_model_parallel_layout='Et*5|t*3L'",
        "model.recompute_granularity=selective",
        "model.recompute_modules=[mlp,layernorm]",
        "ddp.use_distributed_optimizer=true",
        "optimizer.use_distributed_optimizer=true",
    } <= results
    assert "train.micro_batch_size=1" not in results
    back = launch_line(replace(launched(*words), host="megatron.bridge"), wanted, HERE)
    assert {"model.recompute_granularity=null", "model.tensor_model_parallel_size=1"} <= set(
        words_of(back)
    )


@pytest.mark.slow
def test_paths_of_bridge_are_fields_of_megatron_core() -> None:
    """Its model, buckets and optimizer are core's own configurations."""
    pytest.importorskip("megatron.core")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    kinds = {
        "model": TransformerConfig,
        "ddp": DistributedDataParallelConfig,
        "optimizer": OptimizerConfig,
    }
    others = {"model.seq_length"}  # of Bridge's own provider
    paths = {path for results in PATHS.values() for path in results} - others
    strange = [
        path
        for path in sorted(paths)
        if (kind := kinds.get(path.partition(".")[0])) is not None
        and path.partition(".")[2] not in kind.__dataclass_fields__
    ]
    assert strange == []


@pytest.mark.slow
def test_the_trainer_s_own_parser_takes_its_words() -> None:
    transformers = pytest.importorskip("transformers")
    running = replace(HERE, framework="transformers 5.23")
    par = replace(HERE.parallelism, is_optimizer_distributed=True, sharding=Sharding.WEIGHTS)
    batch = Batch(micro_batch_size=4, global_batch_size=32)
    wanted = replace(running, parallelism=par, batch=batch, recompute=Recompute.FULL)
    words = ("t.py", "--output_dir", "x", "--per_device_train_batch_size", "1")
    line = launch_line(launched(*words), running, wanted)
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    result = vars(parser.parse_args([w.text for p in line.program[1:] for w in p.words]))
    assert result["per_device_train_batch_size"] == 4
    assert result["gradient_accumulation_steps"] == 1
    assert result["gradient_checkpointing"] is True and result["fsdp"] == "full_shard auto_wrap"


def test_a_trainer_takes_its_own_arguments() -> None:
    running = replace(HERE, framework="transformers 5.23")
    words = ("t.py", "--per_device_train_batch_size", "1", "--gradient_accumulation_steps=4")
    wanted = replace(
        running,
        parallelism=replace(
            HERE.parallelism, is_optimizer_distributed=True, sharding=Sharding.WEIGHTS
        ),
        batch=Batch(micro_batch_size=4, global_batch_size=32),
        recompute=Recompute.FULL,
    )
    line = launch_line(launched(*words), running, wanted)
    assert line.host is HostKind.TRAINER and line.environment == {}
    assert line.command.endswith(
        "t.py --per_device_train_batch_size 4 --gradient_accumulation_steps=1 "
        "--gradient_checkpointing True --fsdp 'full_shard auto_wrap'"
    )
    back = launch_line(launched(*words_of(line)[2:]), wanted, running)
    assert "--fsdp" not in back.command and "--gradient_checkpointing False" in back.command
    rewritten = launch_line(launched("t.py"), running, wanted)
    assert (
        rewritten.command.endswith(" t.py")
        and "per_device_train_batch_size=4" in rewritten.notes[0]
    )


def test_a_loop_is_told_the_settings_that_differ() -> None:
    running = replace(HERE, framework="PyTorch 2.13")
    wanted = replace(
        running,
        parallelism=replace(
            HERE.parallelism, is_optimizer_distributed=True, sharding=Sharding.WEIGHTS
        ),
        batch=Batch(micro_batch_size=2, global_batch_size=32),
    )
    line = launch_line(launched("t.py", "--batch-size=1"), running, wanted)
    assert line.host is HostKind.LOOP and line.command.endswith("t.py --batch-size=1")
    (settings,) = line.refused
    assert settings.startswith("set in the code: micro-batch 1 -> 2, micro-batches of a step ")
    assert "sharding none -> weights" in settings and " tp " not in settings
    assert launch_line(launched("t.py"), running, running).refused == ()


def test_a_batch_that_the_script_sets_itself_is_not_said(layout: Layout) -> None:
    line = launch_line(Launch(argv=("t.py",)), layout(dp=2, micro=1), layout(dp=2, micro=4))
    assert [change.after for change in line.changes] == ["--micro-batch-size 4"]


def test_a_batch_that_follows_the_passes_is_said(layout: Layout) -> None:
    """Megatron's own default is micro-batch x dp, which another layout would change."""
    running, config = layout(dp=2, micro=1, samples=2), layout(tp=2, micro=1, samples=2)
    line = launch_line(Launch(argv=("t.py",)), running, config)
    assert "--global-batch-size 2" in [change.after for change in line.changes]


def test_what_the_script_has_no_option_for_is_refused(layout: Layout) -> None:
    running = layout(dp=2, program="t.py", absent=("--tensor-model-parallel-size",))
    line = launch_line(Launch(argv=("t.py",)), running, layout(tp=2))
    assert line.refused == ("t.py takes no --tensor-model-parallel-size",)
    assert launch_line(Launch(argv=("t.py",)), running, layout(dp=2, micro=4)).refused == ()
