"""Play a trained policy: python -m common.evaluate RUN_DIR [--episodes N] [--video]."""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from common.errors import UserError

from common.run import threads
from common.run.cli import Episodes, checkpoint_of, exit_codes, parse_flags
from common.run.config import check_ranges


@dataclass(frozen=True)
class EvaluateOptions:
    """Reload a run folder, play full episodes and print the raw return."""

    run_dir: tyro.conf.Positional[str] = ""
    """folder of a run"""
    episodes: Episodes = 20
    """full episodes to play"""
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
    from common.run.evaluator import episodes, shown_return
    from common.run.load import load

    policy = load(options.run_dir, checkpoint)
    logs = policy.trainer.evaluate(options.episodes)["logs"]
    result = shown_return(logs["charts/evaluation_return"], logs["charts/evaluation_std"])
    print(f"{result} over {episodes(options.episodes)}, checkpoint {policy.step}")
    if options.video:
        from common.run.video import save_video

        trainer = policy.trainer
        path = Path(options.run_dir, "videos", f"step_{policy.step}.gif")
        save_video(trainer.evaluator, trainer.state.learner, path)
        print(f"video: {path}")


if __name__ == "__main__":
    with exit_codes("--debug" in sys.argv):
        main(parse_flags(EvaluateOptions, sys.argv[1:], __doc__ or ""))
