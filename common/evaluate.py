"""Play a trained policy: python -m common.evaluate RUN_DIR [--episodes N] [--stochastic]."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from common.errors import UserError, one_line
from common.ranges import NonNegative, Positive, Range

from common.run import threads
from common.run.cli import RunOptions, checkpoint_of, exit_codes, parse_flags
from common.run.config import check_ranges


@dataclass(frozen=True)
class EvaluateOptions:
    """Reload a run folder, play full episodes and print the raw return."""

    run_dir: tyro.conf.Positional[str] = ""
    """folder of a run"""
    episodes: Annotated[int, Range(at_least=1, at_most=100_000)] = 20
    """full episodes to play"""
    max_steps: Positive[int] = RunOptions.eval_max_steps
    """steps after which an episode is cut off"""
    seed: NonNegative[int] | None = None
    """seed of the episodes; the run's if not given"""
    stochastic: bool = False
    """draw actions from the policy instead of taking its mode"""
    checkpoint: str = "latest"
    """a step, latest or best"""
    video: bool = False
    """also write a GIF of one episode into the run folder"""
    debug: bool = False
    """show tracebacks"""


def main(options: EvaluateOptions) -> None:
    """Print `mean ± std` of the raw return."""
    if not options.run_dir:
        raise UserError("give a run folder, such as one under runs/; see --help")
    check_ranges(options)
    checkpoint = checkpoint_of(options.checkpoint)
    threads.use_cores(1)
    from common.run.evaluator import episodes, shown_return, still_running
    from common.run.load import load

    policy = load(options.run_dir, checkpoint, _changes(options))
    policy.trainer.evaluator.max_steps = options.max_steps
    logs = policy.trainer.evaluate(options.episodes)["logs"]
    result = shown_return(logs["charts/evaluation_return"], logs["charts/evaluation_std"])
    print(f"{result} over {episodes(options.episodes)}, checkpoint {policy.step}")
    for line in still_running(logs, options.episodes, options.max_steps):
        print(line)
    if options.video:
        from common.run.logger import video_path
        from common.run.video import save_video

        trainer = policy.trainer
        path = video_path(Path(options.run_dir), policy.step)
        try:
            save_video(trainer.evaluator, trainer.state.learner, path)
        except OSError as error:
            raise UserError(f"--video {path} cannot be written ({one_line(error)})") from error
        print(f"video: {path}")


def _changes(options: EvaluateOptions) -> dict[str, Any]:
    """Return the fields of Config that evaluation is to change."""
    changes: dict[str, Any] = {} if options.seed is None else {"seed": options.seed}
    if not options.stochastic:
        return changes
    from common.run.load import read_run

    saved, module = read_run(Path(options.run_dir))
    if "eval_stochastic" not in module.Config.__dataclass_fields__:
        why = "has no policy to draw actions from"
        if "evaluation_epsilon" in saved:
            why = f"explores by its --evaluation-epsilon, {saved['evaluation_epsilon']} in this run"
        raise UserError(f"--stochastic: {saved['algo']} {why}; leave it out")
    return changes | {"eval_stochastic": True}


if __name__ == "__main__":
    with exit_codes("--debug" in sys.argv):
        main(parse_flags(EvaluateOptions, sys.argv[1:], __doc__ or ""))
