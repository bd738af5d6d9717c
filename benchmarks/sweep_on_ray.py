"""Runs of a sweep on the nodes of a Ray cluster: `sweep.py --ray-address ADDRESS`.

A run is an actor of one core, which Ray puts on a node. There it starts the process that the sweep
would start on one machine. The process dies with its actor, and the actor with its node.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any
from uuid import uuid4

import ray
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

import machine
import report
from common.errors import one_line

if TYPE_CHECKING:
    from sweep import Run

LOOK_SECONDS = 1.0
# The kernel kills the process when the actor's dies, in whatever way it does.
DIE_WITH_ACTOR = ("setpriv", "--pdeathsig", "KILL")

Latest = tuple[int, dict[str, float]]
"""the last logged env step and the latest scalars"""


class Cluster:
    """Starts runs as actors, a core each; those that find no free core wait for one."""

    def __init__(self, lock: IO) -> None:
        # A node that reads the same word there shares the file system of --out.
        self.word = uuid4().hex
        lock.write(self.word)
        lock.flush()
        os.fsync(lock.fileno())
        self.started: dict[Run, Started] = {}

    def start(self, run: "Run", worker: int) -> None:
        """Ask Ray for a core, and for the run's process on it."""
        # By value: a node needs no benchmarks/ on its path, and imports nothing for it.
        for module in (sys.modules[type(run).__module__], sys.modules[__name__], machine, report):
            cloudpickle.register_pickle_by_value(module)
        actor = ray.remote(num_cpus=1)(RunOnNode).remote(run, self.word, os.getcwd())
        self.started[run] = Started(actor, actor.look.remote())

    def poll(self, run: "Run") -> int | None:
        """Return None, or the exit code of a process that has ended: -9 if its node was lost."""
        mine = self.started[run]
        if not ray.wait([mine.reply], timeout=0)[0]:
            return None
        try:
            reply = ray.get(mine.reply)
        except ActorUnavailableError:  # it may come back, or be declared dead
            mine.reply = mine.actor.look.remote()
            return None
        except RayError as error:
            return self._end(run, *_judge(error))
        mine.latest, mine.origin = reply.latest, reply.origin
        run.started = time.monotonic() - reply.seconds
        if reply.code is None:
            mine.reply = mine.actor.look.remote()
            return None
        for name, content in reply.files.items():
            path = run.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return self._end(run, reply.code)

    def progress(self, run: "Run") -> Latest | None:
        """Return the last logged env step and the latest scalars; None while it waits."""
        return self.started[run].latest

    def origin(self, run: "Run") -> tuple[str, str]:
        """Return the commit and the machine that a run trained on."""
        return self.started[run].origin

    def stop(self, run: "Run") -> None:
        """Let a run write its checkpoint and end; one that waits for a core has none to write."""
        if self.started[run].latest is None:
            self.kill(run)
        else:
            self.started[run].actor.stop.remote()

    def kill(self, run: "Run") -> None:
        """End a run at once."""
        ray.kill(self.started[run].actor)

    def _end(self, run: "Run", code: int, reason: str = "") -> int:
        """Free the run's core, and let its last words say what Ray said."""
        self.kill(run)
        if reason:
            with run.output.open("a") as output:
                output.write(f"Ray: {reason}\n")
        return code


@dataclass
class Started:
    """An actor, and what is known of its run."""

    actor: Any
    reply: ray.ObjectRef  # a Reply that is on its way
    latest: Latest | None = None
    origin: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Reply:
    """What a node says of a run's process."""

    code: int | None
    seconds: float
    latest: Latest
    origin: tuple[str, str]  # commit and machine
    files: dict[str, bytes]  # of a run that has ended, if only its node has them


class RunOnNode:
    """The process of a run on a node; when this actor dies, so does the process."""

    def __init__(self, run: "Run", word: str, cwd: str) -> None:
        from common.run.threads import use_cores

        os.chdir(cwd)
        self.run = run
        self.origin = (machine.describe_commit(), machine.describe_cores())
        run.folder.mkdir(parents=True, exist_ok=True)
        shared = run.folder.parent / "lock"
        self.is_shared = shared.exists() and shared.read_text() == word
        if not self.is_shared:
            self._keep_flags()
        use_cores(1)
        environment = {"NPROC": "1", **os.environ}
        with (run.folder / "lock").open("w") as lock:
            # A process that outlived its node's connection may still train this run.
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.started = time.monotonic()
            self.process = run.open_process(environment, lock, DIE_WITH_ACTOR)

    def look(self) -> Reply:
        """Wait a moment for the end of the process, and say how far it is."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LOOK_SECONDS)
        code, seconds = self.process.poll(), time.monotonic() - self.started
        files = {} if code is None or self.is_shared else self._files()
        return Reply(code, seconds, self.run.progress(), self.origin, files)

    def stop(self) -> None:
        """Send SIGTERM."""
        self.process.terminate()

    def _keep_flags(self) -> None:
        """Refuse to go on with what another sweep left on this node in a folder of that name."""
        path, job = self.run.folder / "job.json", self.run.job
        if path.exists() and (difference := job.difference(json.loads(path.read_text()))):
            raise ValueError(
                f"{self.run.folder} on {socket.gethostname()} holds a run {difference}"
            )
        path.write_text(json.dumps(job.identity | {"seconds": 0.0}))

    def _files(self) -> dict[str, bytes]:
        """Return what the run wrote, but for its checkpoints."""
        folder = self.run.folder
        paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
        own = {"checkpoints", "job.json", "lock"}
        return {
            str(path): (folder / path).read_bytes() for path in paths if own.isdisjoint(path.parts)
        }


def _judge(error: RayError) -> tuple[int, str]:
    """Return the exit code that an error of Ray stands for, and its reason in a line.

    One that an actor raised is a failure like a program's; one without it is a lost node.
    """
    raised = error.actor_init_failed if isinstance(error, RayActorError) else False
    return (1, str(error).strip().split("\n")[-1]) if raised else (-signal.SIGKILL, one_line(error))
