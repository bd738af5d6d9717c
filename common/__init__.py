"""What papers do not discuss: environments, replay, networks, logs, checkpoints, the runner."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.policy import Policy

__all__ = ["load"]


def load(run_dir: str, step: int | str = "latest") -> "Policy":
    """Load a run folder's policy; see `common.policy.load`."""
    from common.policy import load as load_policy

    return load_policy(run_dir, step)
