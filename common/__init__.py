"""What the algorithm files share; `common.run` holds the machinery around them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.run.load import Policy
    from common.run.trainer import Trainer

__all__ = ["load", "save"]
__version__ = "0.2.0"


def load(
    run_dir: str | Path, step: int | str = "latest", changes: dict[str, Any] | None = None
) -> "Policy":
    """Load a run folder's policy; see `common.run.load.load`. Open only folders that you trust."""
    from common.run.load import load as load_policy

    return load_policy(run_dir, step, changes)


def save(trainer: "Trainer", folder: str | Path) -> None:
    """Write a trainer that is driven by hand as a run folder; see `common.run.folder.save`."""
    from common.run.folder import save as save_trainer

    save_trainer(trainer, folder)
