"""Whether committed runs are what today's code gives: their first part again, bit by bit.

    python benchmarks/repeat.py
    python benchmarks/repeat.py --folders sweep_value --env-ids CartPole-v1 --share 0.3

Of each group of runs under benchmarks/results/sweep*, the first seed of every commit that made it,
of those whose returns are not all alike if there are any, is trained anew with its flags, as
`benchmarks/sweep.py` does it, until a share of its steps, and on until three returns were other
than the first. Each log point's mean return and number of episodes are compared with the committed
curve. A single different rounding soon acts otherwise and shows there, so equal points mean equal
arithmetic, but for what only later steps compute, and for games so coarse that other actions have
the same returns. Another kind of processor rounds otherwise, too:
where a point differs, the commit of the run is checked out and trained on this machine as well, and
the two codes are compared, their losses too. The same is done where all returns are alike.
benchmarks/results/repeat.json keeps what was found, and `benchmarks/tables.py` names it in each
row. Exits with 1 if a run differs.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from common.errors import UserError
from machine import ROOT, describe_commit, describe_cores, on_cores, usable_cores
from report import Curve, Result, read_curve, read_groups, write_atomically
from sweep import POLL_SECONDS, Job, Run, child_environment

from common.run import cli
from common.run.logger import read_metrics

RESULTS = ROOT / "benchmarks" / "results"
REPEATS = RESULTS / "repeat.json"
TELLING_POINTS = 3  # of returns other than the first, before a comparison ends


@dataclass(frozen=True)
class Options:
    """Which runs to repeat, and how far."""

    folders: tuple[str, ...] = ()
    """folders under benchmarks/results; all with sweeps if none is given"""
    algos: tuple[str, ...] = ()
    """algorithms; all if none is given"""
    env_ids: tuple[str, ...] = ()
    """environments; all if none is given"""
    share: float = 0.1
    """of a run's env steps at least, above 0 and up to 1"""


@dataclass(frozen=True)
class Repeat:
    """What came of one run's first part on another commit."""

    commit: str
    """commit that made the run"""
    repeated_on: str
    """commit that repeated it"""
    machine: str
    beside: bool
    """whether `commit` was trained on this machine, too, because its data differ or tell nothing"""
    until: int
    """env step of the last point that both curves have"""
    differs_at: int | None
    """env step of the first point that differs; None if none does"""
    told: bool
    """whether returns or losses could tell: False where nothing was learned yet"""


def main(options: Options) -> int:
    """Repeat, keep and print; return 1 if a run differs."""
    if not 0 < options.share <= 1:
        raise UserError(f"--share must be above 0 and at most 1, got {options.share}")
    runs = chosen_runs(options)
    if not runs:
        raise UserError("no committed run matches --folders, --algos and --env-ids")
    differ = False
    for name, result in runs.items():
        found = repeat(result, options.share)
        keep(name, found)
        differ |= found.differs_at is not None
        print(f"{name}: {describe(found)}", flush=True)
    return int(differ)


def chosen_runs(options: Options) -> dict[str, Result]:
    """Return a run of each commit of each chosen group, by folder and name of its file.

    Raises:
        UserError: an unknown folder.
    """
    folders = sorted(path.parent for path in RESULTS.glob("sweep*/jobs"))
    names = [folder.name for folder in folders]
    for name in options.folders:
        if name not in names:
            raise UserError(f"unknown --folders {name!r}; accepted are {', '.join(names)}")
    chosen: dict[str, Result] = {}
    for folder in folders:
        groups = read_groups(folder) if folder.name in (options.folders or [folder.name]) else []
        for result in (first for group in groups for first in first_of_commits(group)):
            wanted = result.algo in (options.algos or [result.algo])
            if wanted and result.env_id in (options.env_ids or [result.env_id]):
                chosen[run_name(folder.name, result)] = result
    return chosen


def first_of_commits(group: Iterable[Result]) -> list[Result]:
    """Return the run with the lowest seed of each commit, of those that can tell if any can."""
    ordered = sorted(group, key=lambda run: (has_varied_returns(run.curve), -run.seed))
    return list({run.commit: run for run in ordered}.values())


def has_varied_returns(curve: Curve) -> bool:
    """Say whether a curve has more than one return."""
    return len({value for _, value, _ in curve}) > 1


def run_name(folder: str, result: Result) -> str:
    """Return what a run is called in repeat.json."""
    return f"{folder}/{make_job(result).name}"


def make_job(result: Result) -> Job:
    """Return the job that gave a result."""
    program = ROOT / "algos" / f"{result.algo}.py"
    flags = tuple(result.flags)
    return Job(program, result.setting, result.env_id, result.seed, flags, result.steps)


def repeat(result: Result, share: float) -> Repeat:
    """Train the first part of a run again and compare it."""
    until = last_step(result, share)
    with tempfile.TemporaryDirectory() as scratch:
        part = train_until(Run(make_job(result), Path(scratch)), until)
    found = compare(Part(result.curve, []), part, until)
    # Where nothing was learned, the code of its commit could tell no more than its data.
    beside = found.differs_at is not None or (bool(part.losses) and not found.told)
    if beside:
        found = compare(train_commit(result, until), part, until)
    return Repeat(result.commit, describe_commit(), describe_cores(), beside, *found)


def last_step(result: Result, share: float) -> int:
    """Return how far a run has to be trained again."""
    steps = [step for step, value, _ in result.curve if value != result.curve[0][1]]
    return max([math.ceil(share * result.steps), *steps[:TELLING_POINTS]])


class Part(NamedTuple):
    """The first part of a run."""

    curve: Curve
    losses: list[tuple[int, str, float]]  # env step, name, value; none of a committed run


def train_commit(result: Result, until: int) -> Part:
    """Train the first part of a run with the code of its commit.

    Raises:
        UserError: the commit is not in this repository, or the run ended before.
    """
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as scratch:
        code = Path(scratch) / "code"
        added = subprocess.run([*git, "add", "--detach", code, result.commit], capture_output=True)
        if added.returncode:
            raise UserError(f"commit {result.commit} is not here: {added.stderr.decode().strip()}")
        try:
            job = replace(make_job(result), program=code / "algos" / f"{result.algo}.py")
            return train_until(Run(job, Path(scratch)), until, code)
        finally:
            subprocess.run([*git, "remove", "--force", code], capture_output=True)


def train_until(run: Run, until: int, code: Path = ROOT) -> Part:
    """Train on one core up to an env step.

    Raises:
        UserError: the run ended before.
    """
    run.folder.mkdir(parents=True)
    core = usable_cores()[0]
    environment = child_environment(1) | {"PYTHONPATH": str(code)}
    with (run.folder / "lock").open("w") as lock, on_cores(None if core is None else {core}):
        process = run.open_process(environment, lock)
    try:
        while run.progress()[0] < until and process.poll() is None:
            time.sleep(POLL_SECONDS)
    finally:  # at once: nobody needs its checkpoint
        process.kill()
        process.wait()
    if run.progress()[0] < until:
        raise UserError(f"{run.job.name} ended at step {run.progress()[0]:,}: {run.last_words()}")
    rows = read_metrics(run.run_folders()[-1] / "metrics.csv")
    losses = [(s, name, value) for s, _, name, value in rows if name.startswith("losses/")]
    return Part(read_curve(rows), losses)


class Comparison(NamedTuple):
    """What two curves have in common; the fields are those of Repeat."""

    until: int
    differs_at: int | None
    told: bool


def compare(before: Part, today: Part, until: int) -> Comparison:
    """Compare returns up to an env step, and losses before the last of them if both parts have any.

    Raises:
        UserError: there is no return to compare.
    """
    curves = [[tuple(p) for p in part.curve if p[0] <= until] for part in (before, today)]
    if not curves[0]:
        raise UserError(f"no episode ended in the first {until:,} steps; give a larger --share")
    last = curves[0][-1][0]
    # Those of the last point may have been cut off.
    losses = [[loss for loss in part.losses if loss[0] < last] for part in (before, today)]
    pairs = list(zip_longest(*curves)) + (list(zip_longest(*losses)) if before.losses else [])
    differs = min(((a or b)[0] for a, b in pairs if a != b), default=None)
    told = bool(losses[1]) and (has_varied_returns(curves[0]) or bool(losses[0]))
    return Comparison(last, differs, told)


def keep(name: str, found: Repeat) -> None:
    """Write a finding beside the others."""
    kept = {key: asdict(value) for key, value in read_repeats().items()} | {name: asdict(found)}
    write_atomically(REPEATS, json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


def read_repeats() -> dict[str, Repeat]:
    """Return what is kept, by folder and name of a run."""
    text = REPEATS.read_text() if REPEATS.exists() else "{}"
    return {name: Repeat(**fields) for name, fields in json.loads(text).items()}


def describe(found: Repeat) -> str:
    """Return a finding in words."""
    what = f"{found.commit}, trained here," if found.beside else f"data of {found.commit}"
    if found.differs_at is not None:
        return f"{found.repeated_on} differs from {what} at step {found.differs_at:,}"
    untold = "" if found.told else ", which tells nothing"
    return f"{found.repeated_on} equals {what} up to step {found.until:,}{untold}"


if __name__ == "__main__":
    with cli.exit_codes(debug=False):
        sys.exit(main(cli.parse_flags(Options, sys.argv[1:], __doc__ or "")))
