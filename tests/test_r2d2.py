"""R2D2: memory replayed from storage, targets, priorities and exploration by hand, learning."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from algos.r2d2 import PRESETS, Agent, Algorithm, Config, Trainer
from common.action_masks import UNAVAILABLE
from common.errors import UserError
from common.networks import Memory
from common.replay import Sequences, Transition
from common.targets import value_rescale, value_unrescale

GAMMA, KEY = 0.9, jax.random.key(0)
SMALL = Config(
    env_id="gymnax/CartPole-v1",
    num_envs=2,
    total_timesteps=200,
    learning_starts=80,
    buffer_size=200,
    burn_in=4,
    sequence_length=6,
    sequence_period=5,
    n_step=3,
    batch_size=4,
    core_size=8,
    base_epsilon=0.4,
    train_frequency=20,
    num_steps=20,
)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(SMALL)


@pytest.fixture(scope="module")
def acted(trainer: Trainer) -> tuple[Any, np.ndarray]:
    """The state after 60 vector steps with random parameters, and the Q-values acted on."""
    state, q_values = trainer.state, []

    @jax.jit
    def collect(state: Any) -> tuple[Any, jax.Array]:
        memory = Memory(state.core, ~state.env.ended)
        q_values, _ = trainer.agent.step(state.learner, state.env.obs, memory)
        state, row = trainer._run_collect(state)
        return state._replace(replay=trainer.replay.add(state.replay, row)), q_values

    for _ in range(60):
        state, now = collect(state)
        q_values.append(np.asarray(now))
    return state, np.stack(q_values)  # [T, N, A]


def starts(trainer: Trainer, last: int) -> tuple[jax.Array, jax.Array]:
    rows = np.arange(0, last, trainer.replay.sequence_period)
    time, env = np.meshgrid(rows, np.arange(trainer.replay.num_envs), indexing="ij")
    return jnp.asarray(time.ravel()), jnp.asarray(env.ravel())


def test_q_values_from_the_stored_state_are_those_of_acting(trainer, acted):
    """Burn-in 0, and no update since: over episodes' ends too."""
    state, q_values = acted
    time, env = starts(trainer, 45)
    sequences = trainer.replay.gather_sequences(state.replay, time, env)
    rows = sequences.rows
    assert (~rows.valid).sum() > 5  # some sequences hold an end
    params = state.learner.params
    replayed, _ = trainer.algorithm.predict(params, rows.obs, sequences.extras, rows.valid)
    steps = np.arange(trainer.replay.num_sequence_rows)
    expected = q_values[np.asarray(time)[:, None] + steps, np.asarray(env)[:, None]]
    np.testing.assert_allclose(replayed, expected, atol=1e-5)


def test_burn_in_goes_on_from_the_stored_state(trainer, acted):
    """As acting did: the memory behind the rows that warm it up is the one stored later."""
    state, q_values = acted
    time, env = starts(trainer, 45)
    sequences = trainer.replay.gather_sequences(state.replay, time, env)
    batch = trainer.algorithm.burn_in(state.learner.params, sequences)
    assert batch.rows.reward.shape == (len(time), SMALL.sequence_length + SMALL.n_step)
    np.testing.assert_array_equal(batch.rows.obs, sequences.rows.obs[:, SMALL.burn_in :])
    first, _ = trainer.algorithm.predict(
        state.learner.params, batch.rows.obs[:, :1], batch.extras, batch.rows.valid[:, :1]
    )
    expected = q_values[np.asarray(time) + SMALL.burn_in, np.asarray(env)]
    np.testing.assert_allclose(first[:, 0], expected, atol=1e-5)
    other = jax.tree.map(lambda x: 2 * x, state.learner.params)
    assert (
        jnp.abs(trainer.algorithm.burn_in(other, sequences).extras[0] - batch.extras[0]).max() > 0
    )


def hand_algorithm(**options: Any) -> Algorithm:
    algorithm = object.__new__(Algorithm)
    settings: dict[str, Any] = dict(
        gamma=GAMMA, n_step=2, sequence_length=3, burn_in=0, sequence_period=1
    )
    algorithm.config = replace(Config(), **(settings | options))
    return algorithm


def hand_rows() -> Transition:
    """One sequence of 3 + 2 rows: the second ends its episode, the third is not valid."""
    return Transition(
        obs=jnp.zeros((1, 5, 1)),
        action=jnp.array([[0, 1, 1, 0, 1]]),
        reward=jnp.array([[1.0, 2.0, 0.0, 4.0, 8.0]]),
        terminated=jnp.zeros((1, 5), bool),
        truncated=jnp.array([[False, True, False, False, False]]),
        valid=jnp.array([[True, True, False, True, True]]),
    )


Q_VALUES = jnp.array([[[1.0, 2.0], [5.0, 4.0], [3.0, 1.0], [0.0, 2.0], [6.0, 0.0]]])
TARGET_Q_VALUES = jnp.array([[[9.0, 0.1], [0.2, 9.0], [0.3, 9.0], [9.0, 0.4], [0.5, 9.0]]])


@pytest.mark.parametrize("end", ["terminated", "truncated", "interrupted"])
def test_target_by_hand(end):
    """The online network chooses, the target network values, and no return passes an end."""
    rows, terminated = hand_rows(), end == "terminated"
    if terminated:
        rows = rows._replace(terminated=rows.truncated, truncated=rows.terminated)
    elif end == "interrupted":  # as a resumed run is: the row behind is of another episode
        rows = rows._replace(truncated=rows.terminated)
    target = hand_algorithm().td_target(Q_VALUES, TARGET_Q_VALUES, rows)
    assert target.shape == (1, 3)
    beyond = 0.0 if terminated else float(value_unrescale(jnp.float32(0.3)))  # row 2, action 0
    first = value_rescale(jnp.float32(1 + GAMMA * 2 + GAMMA**2 * beyond))
    second = value_rescale(jnp.float32(2 + GAMMA * beyond))
    np.testing.assert_allclose(target[0, :2], [first, second], rtol=1e-5)


def test_loss_by_hand():
    algorithm = hand_algorithm(priority_eta=0.75)
    algorithm.predict = lambda params, obs, core, valid: (Q_VALUES, core)  # type: ignore
    rows = hand_rows()
    batch = Sequences(rows, extras=(), weight=jnp.array([0.5]))
    loss, (priority, metrics) = algorithm.loss_fn(None, TARGET_Q_VALUES, batch)
    target = algorithm.td_target(Q_VALUES, TARGET_Q_VALUES, rows)[0]
    errors = [float(target[0]) - 1, float(target[1]) - 4]  # the third row is not valid
    np.testing.assert_allclose(loss, 0.5 * np.mean(np.square(errors)), rtol=1e-5)
    sizes = np.abs(errors)
    np.testing.assert_allclose(priority, [0.75 * sizes.max() + 0.25 * sizes.mean()], rtol=1e-5)
    unscaled = value_unrescale(jnp.array([1.0, 4.0]))
    np.testing.assert_allclose(metrics["q_values"], unscaled.mean(), rtol=1e-5)


def test_each_environment_explores_with_its_own_epsilon(trainer):
    paper = Agent(Config(num_envs=8, base_epsilon=0.4), trainer.algorithm)
    np.testing.assert_allclose(paper.epsilon, 0.4 ** np.arange(1.0, 9.0), rtol=1e-5)
    np.testing.assert_allclose(trainer.agent.epsilon, [0.4, 0.4**8], rtol=1e-5)
    learner, obs, keys = trainer.state.learner, jnp.ones((2, 4)), jax.random.split(KEY, 4_000)
    memory = Memory(trainer.state.core, jnp.ones(2, bool))
    best = trainer.agent.step(learner, obs, memory)[0].argmax(axis=-1)  # [N]
    sample = jax.vmap(lambda key: trainer.agent.sample(learner, obs, key, memory)[0])
    # Half of the uniform actions are the greedy one.
    np.testing.assert_allclose((sample(keys) != best).mean(axis=0), [0.2, 0.0], atol=0.02)


def test_an_update_values_with_the_target_network_and_stores_its_priorities(trainer, acted):
    """Its own burn-in, its Q-values, and the importance weights of unequal priorities."""
    state, algorithm = acted[0], trainer.algorithm
    priorities = 1.0 + jnp.arange(8)
    replay = trainer.replay.update_priorities(state.replay, jnp.arange(8), priorities)
    learner = state.learner._replace(target_params=jax.tree.map(jnp.negative, state.learner.params))
    state = state._replace(replay=replay, learner=learner)

    @jax.jit
    def by_hand(state: Any) -> tuple[Any, Any, Any]:
        _, key = jax.random.split(state.key)
        batch = trainer.replay.sample_sequences(state.replay, key, SMALL.batch_size, 0.6)
        params, target_params = state.learner.params, state.learner.target_params
        rows, core, *_ = algorithm.burn_in(target_params, batch)
        target_q_values, _ = algorithm.predict(target_params, rows.obs, core, rows.valid)
        batch = algorithm.burn_in(params, batch)
        loss, (priority, _) = algorithm.loss_fn(params, target_q_values, batch)
        return loss, priority, batch

    loss, priority, batch = by_hand(state)
    assert len(set(batch.weight.tolist())) > 1
    trained, metrics = jax.jit(trainer._run_train)(state)
    np.testing.assert_allclose(metrics["td_loss"], loss, rtol=1e-5)
    stored = trained.replay.priorities.tree[0][batch.index]
    np.testing.assert_allclose(stored, (priority + 1e-6) ** 0.9, rtol=1e-4)


def test_updates_and_syncs_fall_due_at_their_multiples():
    trainer = Trainer(replace(SMALL, target_network_frequency=60))
    start = jax.device_get(trainer.state.learner.params)
    logs = [log_data["logs"] for log_data in trainer()]
    # Of the steps above 80 and up to 200: multiples of 20, and 120 and 180.
    assert sum(log.get("charts/updates", 0) for log in logs) == 6
    assert sum(log.get("charts/target_updates", 0) for log in logs) == 2
    learner = jax.device_get(trainer.state.learner)
    params, target = (x["advantage_head"]["kernel"] for x in learner[:2])
    assert (target != start["advantage_head"]["kernel"]).any()
    assert (target != params).any()  # which moved at 200


def test_unavailable_actions_are_never_valued():
    parts = {"action_mask": spaces.MultiBinary(3), "observation": spaces.Box(-9, 9, (3,))}
    algorithm = Algorithm(SMALL, spaces.Dict(parts), spaces.Discrete(3))
    mask = jnp.array([[[1, 0, 1], [0, 1, 1]]])
    obs = {"action_mask": mask, "observation": jnp.ones((1, 2, 3))}
    params, core = algorithm.init(jax.random.key(0)).params, algorithm.initial_core(1)
    q_values, _ = algorithm.predict(params, obs, core, jnp.ones((1, 2), bool))
    np.testing.assert_array_equal(q_values == UNAVAILABLE, mask == 0)


def test_a_sequence_must_fit_before_the_first_update():
    with pytest.raises(UserError, match=r"--learning-starts 25 comes before.*use at least 26"):
        replace(SMALL, learning_starts=25)
    with pytest.raises(UserError, match="--sequence-period 7 is more than --sequence-length 6"):
        replace(SMALL, sequence_period=7)


@pytest.mark.slow
def test_runs_on_atari_with_the_preset():
    small = dict(buffer_size=400, learning_starts=200, core_size=8, burn_in=2, sequence_length=4)
    small |= dict(sequence_period=4, batch_size=2, num_envs=2, train_frequency=100)
    config = replace(
        Config(env_id="Breakout-v5", **(PRESETS["atari"] | small)), total_timesteps=400
    )
    trainer = Trainer(config)
    assert trainer.state.replay.storage.obs.shape == (200, 2, 84, 84)
    assert trainer.state.replay.storage.extras[0].shape == (50, 2, 8)
    log_data = list(trainer())
    assert log_data[-1]["logs"]["charts/updates"] == 2


@pytest.mark.slow
def test_rows_of_explorers_are_stored_and_learned_from_like_our_own(trainer):
    """The same buffer before the first update, and as many updates; new episodes cut a lane."""
    num_steps = SMALL.num_steps
    collect, learn = jax.jit(trainer.collect_trajectory), jax.jit(trainer.learn_trajectory)
    run = jax.jit(trainer.run_iterations)
    never = jnp.zeros(SMALL.num_envs, bool)
    state = ours = trainer.state
    metrics, updates = trainer.zero_metrics(state), 0
    for count in range(3):
        state, trajectory, is_complete = collect(state)
        assert is_complete
        state, metrics = learn(state, metrics, trajectory._replace(is_new=never))
        ours, our_metrics = run(ours, num_steps)
        updates += int(our_metrics["charts/updates"])
        if count == 0:
            assert updates == 0
            jax.tree.map(np.testing.assert_array_equal, state.replay, ours.replay)
    assert int(metrics["charts/updates"]) == updates > 0
    assert int(state.step) == int(ours.step) == 3 * num_steps * SMALL.num_envs
    newest = (int(state.replay.position) - 1) % trainer.replay.num_rows
    valid = state.replay.storage.valid[newest]
    state, trajectory, _ = collect(state)
    state, _ = learn(state, metrics, trajectory._replace(is_new=never.at[0].set(True)))
    expected = valid.at[0].set(False)
    np.testing.assert_array_equal(state.replay.storage.valid[newest], expected)


@pytest.mark.learning
@pytest.mark.slow
def test_learns_cartpole():
    config = Config(
        env_id="CartPole-v1",
        total_timesteps=30_000,
        learning_starts=1_000,
        learning_rate=1e-3,
        target_network_frequency=250,
        core_size=64,
        train_frequency=20,
    )
    trainer = Trainer(config)
    for _ in trainer():
        pass
    # Without the values beyond the n steps it stays at 100 to 122.
    assert trainer.evaluate(20)["logs"]["charts/evaluation_return"] >= 250
