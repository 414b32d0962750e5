"""A fault in every function of the hooks that training calls, one at a time, in one run.

    python tests/support/fault_sweep.py FOLDER

An error is raised on entry of each function that another of ours has called: what the host calls
itself is the outermost frame, which has nothing to fail.  Windows open again and again, and after
every fault the same function is left in peace.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", FORERUN_DEVICE="cpu")  # before torch is imported

from fault_training import MegatronTraining
from free_ports import free_port

NUM_ITERATIONS = 160
NUM_CALM = 16
"""Steps in which called functions are only noted."""
OUTERMOST = {
    "CoreLoop._wrap",
    "CoreLoop.is_standing_down",
    "Session.is_claimed",
    "PlantedTimer.__init__",
    "Recorder.is_of_step",
}
"""One-line parts of the outermost frames, through which the host's own call passes."""
ROOT = Path(__file__).parents[2]


class Injected(RuntimeError):
    """The fault."""


class Sweep:
    """Raises on entry of each known function of ours, once."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._guard = os.path.join(home, "process", "guard.py")
        self._known: dict[CodeType, str] = {}
        self._pending: set[CodeType] = set()
        self._is_calm = True

    def __call__(self, training: MegatronTraining, moment: str) -> None:
        """Resume tracing, which an error raised in a trace function ends."""
        if moment == "over":
            sys.settrace(None)
            struck = sorted(n for c, n in self._known.items() if c not in self._pending)
            spared = sorted(self._known[code] for code in self._pending)
            text = json.dumps({"struck": struck, "spared": spared})
            (training.folder / "sweep.json").write_text(text)
            return
        if self._is_calm and training.iteration >= NUM_CALM:
            self._is_calm, self._pending = False, set(self._known)
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if not code.co_filename.startswith(self._home) or code.co_filename == self._guard:
            return
        if caller is None or not caller.f_code.co_filename.startswith(self._home):
            return
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.11 and later
        if self._is_calm and name not in OUTERMOST:
            self._known[code] = f"{os.path.relpath(code.co_filename, self._home)} {name}"
        elif code in self._pending:
            self._pending.discard(code)
            raise Injected(code.co_name)


def main(folder: Path) -> None:
    """Train without us, then with us under all faults."""
    sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "tests" / "support")]
    import pretrain_gpt  # noqa: F401

    sys.argv[1:] = []
    for name in ("bare", "ours"):
        home = folder / name
        home.mkdir(parents=True)
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
            train(home, is_bare=name == "bare")
            sys.exit(0)
        _, status = os.waitpid(pid, 0)
        (home / "run.json").write_text(
            json.dumps({"status": [os.waitstatus_to_exitcode(status)], "took_s": 0.0})
        )


def train(home: Path, *, is_bare: bool) -> None:
    """Train once, with or without us."""
    sweep = None
    if not is_bare:
        from forerun import hooks
        from forerun.hooks.process import guard
        from forerun.hooks.process.settings import RankInfo, Settings
        from forerun.hooks.start import start

        guard.MAX_FAULTS = 10**9
        rank = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, run_id="fault")
        start(Settings(rank=rank, steps=4, every=8, directory=home / "out"))
        sweep = Sweep(str(Path(hooks.__file__).parent))
    training = MegatronTraining(home, 0, sweep)
    training.num_iterations = NUM_ITERATIONS
    training.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
