"""What the algorithm files share; `common.run` holds the machinery around them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.run.load import Policy

__all__ = ["load"]
__version__ = "0.2.0"


def load(run_dir: str, step: int | str = "latest") -> "Policy":
    """Load a run folder's policy; see `common.run.load.load`. Open only folders that you trust."""
    from common.run.load import load as load_policy

    return load_policy(run_dir, step)
