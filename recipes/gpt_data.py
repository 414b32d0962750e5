"""Bytes as tokens: windows of text files, determined by the sample number alone.

Every tensor rank and every pipeline stage reads the same micro-batch by itself; Megatron-LM reads
on one tensor rank and broadcasts.  For byte windows the reading costs less than the broadcast.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch

Batch = dict[str, torch.Tensor]


class Split(IntEnum):
    """Part of the bytes: the first 95 % are for training."""

    TRAIN = 0
    VALID = 1


class Corpus:
    """All files concatenated; raises ``SystemExit`` if they are shorter than a few samples."""

    def __init__(self, paths: list[Path], *, seq_length: int, seed: int) -> None:
        self._parts = [np.memmap(path, dtype=np.uint8, mode="r") for path in paths]
        self._ends = np.cumsum([len(part) for part in self._parts])
        self._length, self._seed = seq_length + 1, seed
        num_bytes = int(self._ends[-1]) if paths else 0
        border = num_bytes * 95 // 100
        self._ranges = {Split.TRAIN: (0, border), Split.VALID: (border, num_bytes)}
        if num_bytes - border < 2 * self._length:
            raise SystemExit(
                f"{num_bytes} bytes of text are too few for a sequence length of {seq_length}; "
                f"give at least {40 * self._length} bytes"
            )

    def window(self, split: Split, sample: int) -> np.ndarray:
        """Return the ``seq_length + 1`` bytes of one sample."""
        low, high = self._ranges[split]
        draw = np.random.default_rng((self._seed, int(split), sample))
        start = low + int(draw.integers(high - low - self._length))
        return self._read(start, start + self._length)

    def _read(self, start: int, end: int) -> np.ndarray:
        pieces = []
        while start < end:
            index = int(np.searchsorted(self._ends, start, side="right"))
            before = int(self._ends[index]) - len(self._parts[index])
            piece = self._parts[index][start - before : end - before]
            pieces.append(piece)
            start += len(piece)
        return np.concatenate(pieces)


class CountingCorpus:
    """Mock data: each sample counts upwards from its own byte with its own stride."""

    def __init__(self, *, seq_length: int, seed: int) -> None:
        self._length, self._seed = seq_length + 1, seed

    def window(self, split: Split, sample: int) -> np.ndarray:
        """Return the ``seq_length + 1`` bytes of one sample."""
        draw = np.random.default_rng((self._seed, int(split), sample))
        first, stride = draw.integers(256), draw.integers(1, 8)
        return ((first + stride * np.arange(self._length)) % 256).astype(np.uint8)


def open_corpus(args: argparse.Namespace) -> Corpus | CountingCorpus:
    """Return the data that the arguments name."""
    if args.mock_data:
        return CountingCorpus(seq_length=args.seq_length, seed=args.seed)
    if args.data_path:
        paths = [Path(name) for name in args.data_path]
    else:
        library = Path(sysconfig.get_path("stdlib"))
        paths = sorted(
            path
            for path in [*library.glob("*.py"), *library.glob("*/*.py")]
            if path.parent.name not in ("site-packages", "dist-packages")
        )
    try:
        paths = [path for path in paths if path.stat().st_size > 0]
    except OSError as err:
        raise SystemExit(f"cannot read --data-path {err.filename}: {err.strerror}") from err
    return Corpus(paths, seq_length=args.seq_length, seed=args.seed)


def rows(
    corpus: Corpus | CountingCorpus,
    split: Split,
    *,
    first_sample: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[np.ndarray]:
    """Yield micro-batches of one data-parallel rank without end, from global sample
    ``first_sample`` on.

    Each is ``(micro_batch_size, seq_length + 1)``; ranks alternate, as in Megatron's sampler.
    """
    sample = first_sample + data_parallel_rank * micro_batch_size
    while True:
        yield np.stack([corpus.window(split, sample + row) for row in range(micro_batch_size)])
        sample += micro_batch_size * data_parallel_size


def to_batches(micro_batches: Iterator[np.ndarray]) -> Iterator[Batch]:
    """Yield tokens and the labels that follow them, on the device."""
    for bytes_of in micro_batches:
        tokens = torch.from_numpy(bytes_of.astype(np.int64)).cuda(non_blocking=True)
        yield {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
