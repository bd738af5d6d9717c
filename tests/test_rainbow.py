"""Rainbow: its six parts by hand and in runs, each flag against the file of its part, learning.

The layers with noise are tested in `test_networks.py`, projection, returns and priorities in
`test_targets.py` and `test_replay.py`.
"""

import importlib
import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gymnasium import spaces

from algos.rainbow import PRESETS, Agent, Algorithm, Config, LearnerState, Trainer
from common.errors import UserError
from common.networks import NoisyMLP
from common.replay import Batch, Replay, Transition

PARTS = ("double", "dueling", "prioritized", "noisy", "distributional")
NO_PART: dict[str, Any] = dict.fromkeys(PARTS, False) | {"n_step": 1}
SPACES = spaces.Box(-9, 9, (4,), np.float32), spaces.Discrete(3)
SMALL = Config(
    env_id="gymnax/CartPole-v1",
    num_envs=4,
    buffer_size=400,
    batch_size=16,
    learning_starts=100,
    train_frequency=20,
    target_network_frequency=60,
    log_frequency=400,
    total_timesteps=400,
    adam_epsilon=1e-8,
    num_atoms=11,
)

# p(s, a) on the atoms 0, 1 and 2: rows are states, then two actions
PROBS = jnp.array(
    [
        [[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]],  # Q = 0.75, 1.25
        [[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]],  # Q = 1, 0.75
    ]
)
PARAMS = {"w": jnp.log(PROBS)}
TARGET = {"w": jnp.log(PROBS[::-1])}  # in each state the other action is the greedy one
STATES = jnp.eye(2)


class Logits:
    """A network whose logits are the observation times a matrix, whatever the noise."""

    def __init__(self, params: Any) -> None:
        self.matrix = params["w"]

    def value(self, obs: Any, *_: Any) -> Any:
        obs = obs["observation"] if isinstance(obs, dict) else obs
        return jnp.tensordot(obs, self.matrix, 1)  # [B, A, M]


def linear_algorithm(**options: Any) -> Algorithm:
    algorithm = object.__new__(Algorithm)
    algorithm.config = Config(num_atoms=3, v_min=0.0, v_max=2.0, **options)
    algorithm.support = jnp.array([0.0, 1.0, 2.0])
    algorithm.model = Logits
    algorithm.optimizer = optax.sgd(1.0, momentum=0.5)  # its first step is that of SGD
    return algorithm


def two_step_batch() -> Batch:
    """Row 0 of states 0, 1, 0 with rewards 0.5 and 1: R = 0.5 + 0.5 · 1, γ² = 0.25, s' = 0."""
    replay = Replay(capacity=8, num_envs=1, gamma=0.5, n_step=2)
    state = replay.init(STATES[:1], jnp.zeros(1, int))
    no = jnp.zeros(1, bool)
    for index, reward in ((0, 0.5), (1, 1.0), (0, 9.0)):
        row = Transition(
            STATES[index : index + 1], jnp.array([1]), jnp.array([reward]), no, no, ~no
        )
        state = replay.add(state, row)
    return replay.gather(state, jnp.array([0]), jnp.array([0]))


def random_batch(rows: int = 12) -> Batch:
    rng = np.random.default_rng(0)
    obs, next_obs = rng.normal(size=(2, rows, 4)).astype(np.float32)
    reward, discount = rng.uniform(size=(2, rows)).astype(np.float32)
    weight = rng.uniform(size=rows).astype(np.float32)
    return Batch(obs, np.arange(rows) % 3, reward, discount, next_obs, weight, ())


def logs_of(trainer: Any) -> dict[str, float]:
    return {k: v for log_data in trainer() for k, v in log_data["logs"].items()}


@pytest.mark.parametrize(
    ("double", "expected"),
    [
        # θ chooses 1 in state 0, which θ⁻ holds for 0.5, 0.25, 0.25 on 1, 1.25 and 1.5
        (True, [0, 0.5 + 0.25 * 0.75 + 0.25 * 0.5, 0.25 * 0.25 + 0.25 * 0.5]),
        # θ⁻ chooses 0, for which it has 0.25, 0.5, 0.25
        (False, [0, 0.25 + 0.5 * 0.75 + 0.25 * 0.5, 0.5 * 0.25 + 0.25 * 0.5]),
    ],
)
def test_n_step_target_by_hand(double, expected):
    state = LearnerState(PARAMS, TARGET, ())
    target = linear_algorithm(double=double).td_target(state, two_step_batch(), jax.random.key(0))
    np.testing.assert_allclose(target, [expected], atol=1e-6)


def test_weighted_loss_and_priorities_by_hand():
    # Σ m log(m / p): rows of p = 0.5, 0.25, 0.25 and 0.25, 0.25, 0.5
    target = jnp.array([[0.0, 0.0, 1.0], [0.5, 0.5, 0.0]])
    divergence = np.array([math.log(4), 0.5 * math.log(0.5 / 0.25) * 2])
    batch = two_step_batch()
    batch = batch._replace(
        obs=STATES[jnp.array([0, 0])], action=jnp.array([0, 1]), weight=jnp.array([0.5, 1.0])
    )
    loss, (priority, metrics) = linear_algorithm().loss_fn(PARAMS, batch, target, jax.random.key(0))
    np.testing.assert_allclose(priority, divergence, rtol=1e-6)
    np.testing.assert_allclose(loss, (0.5 * divergence[0] + divergence[1]) / 2, rtol=1e-6)
    np.testing.assert_allclose(metrics["td_loss"], loss)
    np.testing.assert_allclose(metrics["q_values"], (0.5 * 0.75 + 1.25) / 1.5, rtol=1e-6)


def test_gradient_step_by_hand():
    # dL/dlogits(s, a) = w (p - m): the target is a constant, for both networks
    algorithm = linear_algorithm()
    batch = two_step_batch()._replace(weight=jnp.array([0.5]))
    state = LearnerState(PARAMS, TARGET, algorithm.optimizer.init(PARAMS))
    new_state, priority, _ = algorithm.learn(state, batch, jax.random.key(0))
    target = algorithm.td_target(state, batch, jax.random.key(0))[0]
    expected = np.zeros((2, 2, 3))
    expected[0, 1] = 0.5 * (target - PROBS[0, 1])
    np.testing.assert_allclose(new_state.params["w"] - PARAMS["w"], expected, atol=1e-6)
    np.testing.assert_allclose(new_state.opt_state[0].trace["w"], -expected, atol=1e-6)
    np.testing.assert_array_equal(new_state.target_params["w"], TARGET["w"])
    np.testing.assert_allclose(priority, [optax.kl_divergence(PARAMS["w"][0, 1], target)])


@pytest.mark.parametrize("double", [True, False])
def test_no_unavailable_action_is_chosen(double):
    # Only action 0 in the first row, everything in the second, as a mask of zeros says
    obs = {"action_mask": jnp.array([[1, 0], [0, 0]]), "observation": STATES[jnp.array([0, 0])]}
    rows = dict(reward=jnp.zeros(2), discount=jnp.ones(2), weight=jnp.ones(2), extras=())
    batch = Batch(obs=obs, action=jnp.zeros(2, int), next_obs=obs, **rows)
    algorithm = linear_algorithm(double=double)
    target = algorithm.td_target(LearnerState(PARAMS, PARAMS, ()), batch, jax.random.key(0))
    np.testing.assert_allclose(target, PROBS[0], atol=1e-6)


def stream(params: Any, noisy: bool, obs: np.ndarray) -> np.ndarray:
    """Outputs of a stream from its parameters, in float64 and without noise."""
    layers = params["layers"].values()
    if not noisy:
        torso, head = layers
        layers = [*torso["layers"].values(), head]
    x, name = np.float64(obs), "mean_" if noisy else ""
    for depth, layer in enumerate(layers):
        x = np.maximum(x, 0) if depth else x
        x = x @ np.float64(layer[f"{name}kernel"]) + np.float64(layer[f"{name}bias"])
    return x


@pytest.mark.parametrize("noisy", [True, False])
@pytest.mark.parametrize("num_atoms", [5, 1])
def test_dueling_from_the_parameters(noisy, num_atoms):
    atoms = {"num_atoms": 5} if num_atoms > 1 else {"distributional": False}
    algorithm = Algorithm(Config(noisy=noisy, **atoms), *SPACES)
    params = algorithm.init(jax.random.key(0)).params
    obs = random_batch().obs
    value = stream(params["value_stream"], noisy, obs)[:, None]  # [B, 1, M]
    advantages = stream(params["advantage_stream"], noisy, obs).reshape(12, 3, num_atoms)
    expected = value + advantages - advantages.mean(axis=1, keepdims=True)
    assert value.shape == (12, 1, num_atoms)
    logits = jax.jit(algorithm.model(params).value)(obs)
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    probs = np.exp(expected) / np.exp(expected).sum(axis=-1, keepdims=True)
    mean = probs @ np.linspace(-100, 100, 5) if num_atoms > 1 else expected[..., 0]
    np.testing.assert_allclose(jax.jit(algorithm.predict)(params, obs), mean, atol=1e-3)


def drawn_keys(monkeypatch: Any, config: Config) -> list:
    """The keys of the noise of all streams in one update."""
    keys, plain = [], NoisyMLP.__call__

    def call(self, x, key=None, num_draws=1):
        keys.append(jax.random.key_data(key))
        assert num_draws == 1, "shared by the rows of a batch"
        return plain(self, x)

    monkeypatch.setattr(NoisyMLP, "__call__", call)
    algorithm = Algorithm(config, *SPACES)
    state = algorithm.init(jax.random.key(0))

    @jax.jit
    def learn(batch, key):
        algorithm.learn(state, batch, key)
        return keys

    return [tuple(np.asarray(key).tolist()) for key in learn(random_batch(), jax.random.key(1))]


def test_every_pass_and_stream_has_noise_of_its_own(monkeypatch):
    keys = drawn_keys(monkeypatch, Config(num_atoms=5))
    assert len(keys) == 6  # two streams of θ⁻ on s', of θ on s' and of θ on s: no pass more
    assert len(set(keys)) == 6


def test_without_double_there_is_one_pass_less(monkeypatch):
    keys = drawn_keys(monkeypatch, Config(num_atoms=5, double=False))
    assert len(keys) == len(set(keys)) == 4


def test_environments_explore_differently_and_evaluation_does_not():
    config = Config(num_envs=50, num_atoms=5)
    algorithm = Algorithm(config, *SPACES)
    agent, params = Agent(config, algorithm), algorithm.init(jax.random.key(0)).params
    target_params = jax.tree.map(lambda x: -x, params)
    state, obs = LearnerState(params, target_params, ()), jnp.ones((50, 4))
    sample, predict = jax.jit(agent.sample), jax.jit(agent.predict)
    actions = [np.asarray(sample(state, obs, 0, jax.random.key(i))) for i in range(100)]
    assert len(np.unique(actions[0])) > 1, "of the same observation"
    assert (np.ptp(actions, axis=0) > 0).all(), "each environment draws again at each step"
    best = np.asarray(jax.jit(algorithm.predict)(params, obs).argmax(axis=1))
    assert all((predict(state, obs, jax.random.key(i)) == best).all() for i in range(3))


def test_without_noise_actions_are_epsilon_greedy():
    config = Config(num_envs=500, noisy=False, num_atoms=5, start_epsilon=0.6, end_epsilon=0.0)
    algorithm = Algorithm(config, *SPACES)
    agent, params = Agent(config, algorithm), algorithm.init(jax.random.key(0)).params
    assert "sigma" not in str(jax.tree.structure(params))
    state, obs = LearnerState(params, params, ()), jnp.ones((500, 4))
    best = algorithm.predict(params, obs).argmax(axis=1)
    first, last = (agent.sample(state, obs, step, jax.random.key(0)) for step in (0, 500_000))
    np.testing.assert_allclose((first == best).mean(), 0.4 + 0.6 / 3, atol=0.08)
    assert (last == best).all()


def variant(name: str, config: Config) -> tuple[Any, Any]:
    """An algorithm file, and its Config with the values that Rainbow's shares with it."""
    module = importlib.import_module(f"algos.{name}")
    fields = set(vars(module.Config())) & set(vars(config))
    return module, module.Config(**{field: getattr(config, field) for field in fields})


def with_one_part(part: str, **options: Any) -> Config:
    return replace(SMALL, **NO_PART | {part: True} | options)


def moved_head(params: Any) -> Any:
    """Parameters of a file without streams from those of Rainbow's only one."""
    torso, head = params["advantage_stream"]["layers"].values()
    return {"torso": torso, "head": head}


@pytest.mark.parametrize("part", ["double", "distributional"])
@pytest.mark.slow
def test_with_one_part_targets_and_loss_are_those_of_its_file(part):
    config = with_one_part(part)
    module, options = variant({"double": "double_dqn", "distributional": "c51"}[part], config)
    rainbow, other = Algorithm(config, *SPACES), module.Algorithm(options, *SPACES)
    params, target_params = (rainbow.init(jax.random.key(i)).params for i in (0, 1))
    state, other_state = (
        LearnerState(f(params), f(target_params), ()) for f in (lambda x: x, moved_head)
    )
    batch, key = random_batch(), jax.random.key(2)
    target = rainbow.td_target(state, batch, key)
    if part == "double":
        expected = other.td_target(other_state, batch)
    else:
        expected = other.td_target(other_state.target_params, batch)
    np.testing.assert_allclose(target, expected, rtol=1e-5)
    grads, (priority, _) = jax.grad(rainbow.loss_fn, has_aux=True)(params, batch, target, key)
    gradient = jax.grad(other.loss_fn, has_aux=True)
    other_grads, metrics = gradient(other_state.params, batch, expected)
    compare = lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5)  # noqa: E731
    jax.tree.map(compare, moved_head(grads), other_grads)
    entropy = -jax.scipy.special.xlogy(target, target).sum(axis=-1)  # [B], for the cross-entropy
    row_loss = priority + entropy if part == "distributional" else priority**2
    np.testing.assert_allclose((batch.weight * row_loss).mean(), metrics["td_loss"], rtol=1e-5)


def test_with_dueling_alone_values_are_those_of_its_file():
    config = with_one_part("dueling")
    module, options = variant("dueling_dqn", config)
    rainbow, other = Algorithm(config, *SPACES), module.Algorithm(options, *SPACES)
    params, mapped = rainbow.init(jax.random.key(0)).params, {}
    for name in ("value", "advantage"):
        torso, head = params[f"{name}_stream"]["layers"].values()
        mapped |= {f"{name}_torso": torso, f"{name}_head": head}
    obs = random_batch().obs
    np.testing.assert_allclose(rainbow.predict(params, obs), other.predict(mapped, obs), rtol=1e-5)


def test_with_noise_alone_targets_are_those_of_its_file():
    """The greedy action of the target is that of the values that it takes, under their noise."""
    config = with_one_part("noisy")
    module, options = variant("noisy_dqn", config)
    rainbow, other = Algorithm(config, *SPACES), module.Algorithm(options, *SPACES)
    params, batch, key = rainbow.init(jax.random.key(0)).params, random_batch(), jax.random.key(1)
    mapped = {"mlp": params["advantage_stream"]}
    target = jax.jit(rainbow.td_target)(LearnerState(params, params, ()), batch, key)
    target_key, _ = jax.random.split(key)
    _, stream_key = jax.random.split(target_key)
    expected = jax.jit(other.td_target)(mapped, batch, stream_key)
    np.testing.assert_allclose(target, expected, rtol=1e-5)
    means = jax.jit(other.predict)(mapped, batch.next_obs).max(axis=1)
    assert not np.isclose(target, batch.reward + batch.discount * means, rtol=1e-3).all()


@pytest.mark.parametrize(("part", "name"), [(None, "dqn"), ("prioritized", "prioritized_dqn")])
def test_a_run_with_at_most_priorities_is_that_of_the_file(part, name):
    """But for rounding: over one flat vector, as there, XLA joins Adam's operations otherwise."""
    config = replace(SMALL, **NO_PART | ({part: True} if part else {}))
    module, options = variant(name, config)
    rainbow, other = Trainer(config), module.Trainer(options)
    logs, expected = logs_of(rainbow), logs_of(other)
    assert logs["charts/updates"] == 15 and logs.keys() == expected.keys()
    compare = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7)
    jax.tree.map(compare, moved_head(rainbow.state.learner.params), other.state.learner.params)
    jax.tree.map(compare, rainbow.state.replay, other.state.replay)
    np.testing.assert_allclose(logs["losses/td_loss"], expected["losses/td_loss"], rtol=1e-5)


@pytest.fixture(scope="module")
def without_noise() -> Trainer:
    """Compiled once for two tests."""
    return Trainer(replace(SMALL, noisy=False))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.slow
def test_every_part_can_be_taken_out(part, without_noise):
    """Traced with the others as they are, and run without noise, which is slow to compile."""
    config = replace(SMALL, **{part: False})
    trainer = Trainer(config)
    _, metrics = jax.eval_shape(trainer.run_iterations, trainer.state, 1)
    assert metrics["td_loss"].shape == ()
    params, priorities = trainer.state.learner.params, trainer.state.replay.priorities
    assert ("value_stream" in params) == (part != "dueling")
    assert ("sigma" in str(jax.tree.structure(params))) == (part != "noisy")
    assert bool(priorities) == (part != "prioritized")
    trainer = without_noise if part == "noisy" else Trainer(replace(config, noisy=False))
    logs = logs_of(trainer)
    assert logs["charts/updates"] == 15 and logs["charts/target_updates"] == 5
    assert np.isfinite(list(logs.values())).all() and logs["losses/td_loss"] > 0
    assert 0 < logs["charts/epsilon"] < 1 and trainer.replay.n_step == 3


def test_priorities_are_the_losses_of_the_rows_just_learned(without_noise):
    trainer = without_noise
    first = trainer.init_state(jax.random.key(1))
    learner = jax.tree.map(jnp.copy, first.learner)
    last, metrics = trainer.compiled_run(first, 120 // 4)
    assert metrics["charts/updates"] == 1
    places, state = np.arange(400), last.replay
    leaves = np.array(state.priorities.tree[0])[:400]
    batch = jax.jit(trainer.replay.gather)(state, places // 4, places % 4)
    complete = (places < (30 - 3) * 4) & (batch.weight > 0)
    assert not leaves[~complete].any()
    learned = complete & (leaves != 1)
    assert 8 <= learned.sum() <= 16
    key = jax.random.key(0)
    td_target = trainer.algorithm.td_target(learner, batch, key)
    _, (priority, _) = trainer.algorithm.loss_fn(learner.params, batch, td_target, key)
    expected = (priority + 1e-6) ** 0.5
    np.testing.assert_allclose(leaves[learned], expected[learned], rtol=1e-3)
    assert len(np.unique(leaves[learned])) > 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_atoms": 1}, "--num-atoms 1 between .* use at least 2"),
        ({"v_min": 5.0, "v_max": 5.0}, "--v-min 5.0 and --v-max 5.0: .* a --v-max above --v-min"),
        ({"priority_exponent": 0.0}, "--priority-exponent must be above 0, got 0.0"),
        ({"n_step": 4, "learning_starts": 39}, "--learning-starts 39 .* use at least 40"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(UserError, match=message) as raised:
        Config(**options)
    assert "\n" not in str(raised.value)


def test_the_first_steps_are_uniform_and_the_later_ones_greedy_under_noise():
    config = Config(env_id="gymnax/CartPole-v1", num_envs=1_000, learning_starts=4_000, sigma=1.0)
    agent = Agent(config, Algorithm(config, spaces.Box(-9, 9, (4,)), spaces.Discrete(2)))
    learner, key = agent.algorithm.init(jax.random.key(0)), jax.random.key(1)
    learner = learner._replace(target_params=jax.tree.map(lambda x: -x, learner.params))
    obs = jnp.ones((1_000, 4))
    first = agent.sample(learner, obs, jnp.int32(3_999), key)
    assert abs(first.mean() - 0.5) < 0.07
    later = agent.sample(learner, obs, jnp.int32(4_000), key)
    noise_key, _ = jax.random.split(key)
    q_values = agent.algorithm.predict(learner.params, obs, noise_key, 1_000)
    np.testing.assert_array_equal(later, q_values.argmax(axis=-1))
    assert 0 < later.mean() < 1 and (first != later).any()
    # The first step of Adam is -α g / (|g| + ε), half of α where g is ε.
    optimizer, params = agent.algorithm.optimizer, {"w": jnp.zeros(1)}
    updates, _ = optimizer.update({"w": jnp.array([1.5e-4])}, optimizer.init(params))
    np.testing.assert_allclose(updates["w"], -2.5e-4 / 2, rtol=1e-4)


@pytest.mark.slow
def test_runs_on_atari_with_the_preset():
    preset = PRESETS["atari"] | {"buffer_size": 200, "learning_starts": 100}
    config = Config(env_id="Pong-v5", **preset)
    config = replace(config, num_envs=2, total_timesteps=108, log_frequency=108, batch_size=2)
    trainer = Trainer(config)
    np.testing.assert_allclose(trainer.algorithm.support, np.linspace(-10, 10, 51), atol=1e-5)
    params, num_actions = trainer.state.learner.params, int(trainer.env.action_space.n)
    for name, outputs in (("value_stream", 51), ("advantage_stream", num_actions * 51)):
        kernels = [layer["sigma_kernel"].shape for layer in params[name]["layers"].values()]
        assert kernels == [(7 * 7 * 64, 512), (512, outputs)]
    kernels = [x.shape for x in jax.tree.leaves(params["encoder"]) if x.ndim > 1]
    assert sorted(kernels) == [(3, 3, 64, 64), (4, 4, 32, 64), (8, 8, 4, 32)]
    logs = logs_of(trainer)
    assert logs["charts/updates"] == 2 and 0 < logs["losses/td_loss"] < 2 * math.log(51)
    assert abs(logs["losses/q_values"]) <= 10


@pytest.mark.learning
@pytest.mark.slow
def test_learns_cartpole():
    config = Config(
        total_timesteps=50_000,
        learning_starts=1_000,
        learning_rate=1e-3,
        batch_size=64,
        target_network_frequency=250,
        train_frequency=8,
        num_atoms=51,
        v_min=0.0,
    )
    trainer = Trainer(config)
    for _ in trainer():
        pass
    # 3 seeds gave 356 to 500; no bootstrap gave 9 and 60 (with the first actions greedy).
    assert trainer.evaluate(20)["logs"]["charts/evaluation_return"] >= 250
