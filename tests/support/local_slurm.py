"""A real Slurm on this machine: one controller, one node, no other configuration touched.

It needs root and Debian's packages slurmctld, slurmd and slurm-client; without them a test that
asks for it is skipped.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from free_ports import free_port

CONFIGURATION = """
ClusterName=forerun
SlurmctldHost={name}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=5
MailProg=/bin/true
NodeName={name} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
PATIENCE_S = 60.0


def is_installed() -> bool:
    """Return True if a Slurm can be started here."""
    return os.geteuid() == 0 and all(map(shutil.which, ("slurmctld", "slurmd", "scontrol")))


class LocalSlurm:
    """Jobs on the one node; ``environ`` is the environment of its commands."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environ = {**os.environ, "SLURM_CONF": str(home / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """Return the output of a Slurm command."""
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, check=True, cwd=self.home
        )
        return done.stdout

    def submit(self, script: str, *options: str) -> str:
        """Submit a job and return its number."""
        path = self.home / f"job{time.monotonic_ns()}.sh"
        path.write_text("#!/bin/bash\n" + script)
        return self.ask("sbatch", "--parsable", *options, str(path)).strip()

    def end_of(self, job_id: str) -> dict[str, str]:
        """Return the fields of a job once it has ended."""
        end = time.monotonic() + PATIENCE_S
        while True:
            shown = self.ask("scontrol", "show", "job", "-o", job_id)
            fields = {word.partition("=")[0]: word.partition("=")[2] for word in shown.split()}
            if fields["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return fields
            assert time.monotonic() < end, shown
            time.sleep(0.2)


@contextmanager
def local_slurm(home: Path) -> Iterator[LocalSlurm]:
    """Start a Slurm that is ready for jobs, and stop it afterwards."""
    for name in ("state", "spool"):
        (home / name).mkdir()
    ports = [free_port(), free_port()]
    (home / "slurm.conf").write_text(
        CONFIGURATION.format(
            name=socket.gethostname(),
            home=home,
            cpus=os.cpu_count(),
            controller_port=ports[0],
            node_port=ports[1],
        )
    )
    slurm = LocalSlurm(home)
    daemons = [_daemon(name, slurm) for name in ("slurmctld", "slurmd")]
    try:
        end = time.monotonic() + PATIENCE_S
        while "idle" not in _state(slurm):
            assert time.monotonic() < end, (home / "slurmd.log").read_text()
            time.sleep(0.2)
        yield slurm
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


def _daemon(name: str, slurm: LocalSlurm) -> subprocess.Popen[bytes]:
    with (slurm.home / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [name, "-D", "-f", slurm.environ["SLURM_CONF"]],
            stdout=log,
            stderr=log,
            env=slurm.environ,
            cwd=slurm.home,
        )


def _state(slurm: LocalSlurm) -> str:
    done = subprocess.run(
        ["sinfo", "-h", "-o", "%t"], env=slurm.environ, capture_output=True, text=True, check=False
    )
    return done.stdout
