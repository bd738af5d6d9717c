"""The one contract between algorithm files and the machinery: what it may ask of a Trainer."""

from collections.abc import Callable, Generator
from dataclasses import Field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jax import Array

from common.envs import Env, EnvConfig, EnvState
from common.rollout import Trajectory

if TYPE_CHECKING:
    from common.run.evaluator import Evaluator

Presets = dict[str, dict[str, Any]]


class RunConfig(EnvConfig, Protocol):
    """The fields that the machinery reads of an algorithm's Config, a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def total_timesteps(self) -> int:
        """Env steps over all environments."""

    @property
    def log_frequency(self) -> int:
        """Env steps between two log points."""


class TrainState(Protocol):
    """A NamedTuple of every array of the training process, with these fields and maybe others."""

    @property
    def learner(self) -> Any:
        """What learning changes: the algorithm's LearnerState."""

    @property
    def env(self) -> EnvState:
        """What changes while the environments run."""

    @property
    def key(self) -> Array:
        """The key of the next random draw."""

    @property
    def step(self) -> Array:
        """Env steps done over all environments [] int32."""

    def _asdict(self) -> dict[str, Any]: ...

    @property
    def _replace(self) -> Callable[..., Any]: ...


class Agent(Protocol):
    """What acts; its methods are pure, and what they take besides differs between algorithms."""

    @property
    def predict(self) -> Callable[..., Any]:
        """Return the actions to evaluate with."""

    @property
    def sample(self) -> Callable[..., Any]:
        """Return the actions to train with."""

    @property
    def learn(self) -> Callable[..., Any]:
        """Make one update."""


class Trainer(Protocol):
    """The training process of an algorithm file."""

    env: Env

    @property
    def config(self) -> RunConfig:
        """The hyper-parameters."""

    @property
    def agent(self) -> Agent:
        """What acts in the environments."""

    @property
    def evaluator(self) -> "Evaluator":
        """What plays episodes in environments of their own."""

    @property
    def state(self) -> TrainState:
        """Where training is: everything that a checkpoint holds."""

    @state.setter
    def state(self, state: Any) -> None: ...

    @property
    def compiled_run(self) -> Callable[..., tuple[Any, dict[str, Array]]]:
        """`run_iterations` as a compiled program, which takes over the memory of its state."""

    @compiled_run.setter
    def compiled_run(self, compiled_run: Any) -> None: ...

    def __call__(self) -> Generator[dict, None, None]:
        """Train to total_timesteps; yield log_data at each log point."""

    def evaluate(self, num_episodes: int = 20) -> dict:
        """Play full episodes; log_data of their raw returns."""

    def init_state(self, key: Array) -> TrainState:
        """Start: new parameters, new episodes."""

    def run_iterations(self, state: Any, num_iterations: Any) -> tuple[Any, dict[str, Array]]:
        """(collect, learn) × num_iterations; traceable."""


class LearnerConfig(RunConfig, Protocol):
    """The fields that Explorers need besides."""

    @property
    def num_steps(self) -> int:
        """Steps of each environment in a trajectory."""


class Learner(Trainer, Protocol):
    """A Trainer whose collecting and learning can be done in different processes."""

    # How Explorers keep pace with the Learner. "synchronous": they share out the environments, and
    # it learns from a trajectory of each, side by side, all of the newest policy. "in_step": the
    # same, of the policies that they had. "asynchronous": each has num_envs environments, and it
    # learns first from what arrives first.
    pace: ClassVar[str]

    @property
    def config(self) -> LearnerConfig:
        """The hyper-parameters."""

    def zero_metrics(self, state: Any) -> dict[str, Array]:
        """Return the zeros that metrics are added to; traceable."""

    def collect_trajectory(self, state: Any) -> tuple[Any, Trajectory, Array]:
        """Return the state behind a trajectory, it, and whether it is whole; traceable.

        Needs neither the optimizer's state nor a replay buffer.
        """

    def learn_trajectory(
        self, state: Any, metrics: dict[str, Array], trajectory: Trajectory
    ) -> tuple[Any, dict[str, Array]]:
        """Learn from a trajectory, and add to the metrics; traceable."""


Call = Callable[[Trainer], Generator[dict, None, None]]


def start(trainer: Trainer) -> Generator[dict, None, None]:
    """Call a trainer: what the decorators of the runner are wrapped around."""
    return trainer()
