"""Arguments that are recorded of a command line; secrets are not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.arguments.passed_on import (
    MASK,
    masked_arguments,
    masked_command,
    masked_text,
    unmask_arguments,
)

MEGATRON = (
    *("pretrain_gpt.py", "--tokenizer-type", "GPT2BPETokenizer", "--tokenizer-model", "/a/b.model"),
    *("--num-query-groups", "4", "--kv-channels", "64", "--vocab-size=50257", "--bf16"),
    *("--data-path", "0.5", "/data/a", "0.5", "/data/b", "--lr", "-1e-4", "--fim-pad-token", "PAD"),
    *("--moe-token-dispatcher-type", "alltoall", "--rampup-batch-size", "8", "8", "300"),
    *("--no-rl-skip-bos-token", "--wandb-project", "mine", "--save", "s3://bucket/run@1"),
)
_NAMES = """
    hub-token api_key WANDB_API_KEY password db-passwd client.secret credential-file authorization
    aws-secret-access-key Passphrase pass-word x-auth token bearerToken
"""
NAMES = st.sampled_from(_NAMES.split())
SECRETS = st.text("ABCDEFGHJKLMNPQRSTUVWXYZ23456789", min_size=12, max_size=40)
FORMS = (
    lambda name, secret: [f"--{name}", secret],
    lambda name, secret: [f"--{name}={secret}"],
    lambda name, secret: [f"--{name}", "x", secret, "y"],
    lambda name, secret: [f"-{name}", secret],
    lambda name, secret: [f"{name}={secret}"],
    lambda name, secret: [f"+trainer.{name}={secret}"],
    lambda name, secret: ["--wandb-exp-name", f"{name}={secret}"],
    lambda name, secret: ["--load", f"https://me:{secret}@host/path"],
    lambda name, secret: [f"--load=https://{secret}@host/path?{name}={secret}"],
    lambda name, secret: [f"-p{secret}"],
    lambda name, secret: ["--bf16", "--", secret],
    lambda name, secret: [f"--{name}:{secret}"],
    lambda name, secret: ["--data-path", f"/a?{name}={secret}&b=1"],
)
TEXTS = ("{}={}", "--{} {}", '"{}": "{}"', "{}: Bearer {}", "--{}={}")


def test_what_megatron_knows_stays_as_it_is() -> None:
    assert masked_arguments(MEGATRON) == MEGATRON
    launched = ("torchrun", "--nproc-per-node", "8", "--rdzv-endpoint=h:29500", *MEGATRON)
    assert masked_command(launched) == launched
    ours = (*launched, "--calibrate", "--calibrate-dir=out")
    assert masked_command(ours) == ours


@settings(max_examples=200, deadline=None)
@given(NAMES, SECRETS, st.sampled_from(FORMS), st.integers(0, 3))
def test_no_planted_secret_is_kept(name: str, secret: str, form, place: int) -> None:
    words = form(name, secret)
    at = {0: 1, 1: 3, 2: 5, 3: len(MEGATRON)}[place]
    argv = (*MEGATRON[:at], *words, *MEGATRON[at:])
    masked = masked_arguments(argv)
    assert secret not in " ".join(masked) and len(masked) == len(argv)
    assert masked_arguments(masked) == masked
    for command in (
        ("torchrun", "--nproc-per-node", "8", *argv),
        ("env", f"{name}={secret}", "srun", "--export", f"{name}={secret}", "bash", "x.sh", secret),
        ("bash", "-c", f"{name}={secret} torchrun t.py"),
    ):
        assert secret not in " ".join(masked_command(command))
    # The words that are kept out of files come back where the command is at hand.
    assert unmask_arguments(masked, argv) == argv


@settings(max_examples=100, deadline=None)
@given(NAMES, SECRETS, st.sampled_from(TEXTS))
def test_no_planted_secret_is_said(name: str, secret: str, form: str) -> None:
    message = masked_text(f"cannot read step 3 (rank 0); {form.format(name, secret)}, go on")
    assert secret not in message
    assert message.startswith("cannot read step 3 (rank 0)") and message.endswith("go on")


@pytest.mark.parametrize(
    "text",
    (
        "tokens/s: 71,200 · step 1.8 s",
        "KeyError: 'step'",
        "--tokenizer-type GPT2BPETokenizer is not read; --num-query-groups 4",
        "report: forerun-out/report.html · decision.json",
    ),
)
def test_what_is_no_secret_is_said_as_it_is(text: str) -> None:
    assert masked_text(text) == text


def test_a_missing_value_gives_no_command() -> None:
    assert unmask_arguments(("t.py", "--pin", MASK), ("t.py", "--lr", "1")) == ()
    assert unmask_arguments(("t.py", "--load", MASK + "@h"), ("t.py",)) == ()


def test_a_saved_address_is_loaded_with_its_password() -> None:
    host = ("t.py", "--save", "ssh://me:pw@h/x")
    masked = masked_arguments(host)
    advised = (*masked, "--load", masked[-1])
    assert unmask_arguments(advised, host) == (*host, "--load", host[-1])
