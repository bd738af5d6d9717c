"""PQN: Q(λ) targets and loss by hand, steps of RAdam, LayerNorm, exact counts, and learning."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from q_learning import PARAMS, linear_algorithm
from run_helpers import best_return
from toy_envs import NonsenseEnv, TimerJaxEnv, use_env

from algos import pqn
from algos.pqn import PRESETS, Agent, Algorithm, Config, Trainer
from common.replay import Transition
from common.rollout import TargetBatch, Trajectory

# Some episodes of random actions end by falling, some by the time limit.
SMALL = Config(
    env_id="gymnax/CartPole-v1",
    env_kwargs=("max_steps_in_episode=16",),
    num_envs=4,
    num_steps=32,
    total_timesteps=440,
    log_frequency=128,
    update_epochs=2,
    num_minibatches=2,
)
VECTOR, TWO = spaces.Box(-9, 9, (4,), np.float32), spaces.Discrete(2)


def leaves_equal(left, right) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


# --- Targets --------------------------------------------------------------------------------------

# A lane each: terminated at row 1, truncated at rows 0 and 3, terminated at the window's end.
VALUE = [[1, 3, 0], [2, 7, 0], [100, 1, 0], [4, 2, 2]]
REWARD = [[1, 1, 0], [3, 0, 0], [0, 2, 0], [3, 3, 5]]
TERMINATED = [[0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 1]]
TRUNCATED = [[0, 1, 0], [0, 0, 0], [0, 0, 0], [0, 1, 0]]
VALID = [[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1]]


def test_targets_by_hand():
    algorithm = linear_algorithm(pqn, gamma=0.5, q_lambda=0.5)
    rollout = Transition(
        obs=jnp.arange(12.0).reshape(4, 3),
        action=jnp.arange(12).reshape(4, 3) % 2,
        reward=jnp.float32(REWARD),
        terminated=jnp.array(TERMINATED, bool),
        truncated=jnp.array(TRUNCATED, bool),
        valid=jnp.array(VALID, bool),
        extras=jnp.float32(VALUE),
    )
    batch = jax.jit(algorithm.targets)(rollout, jnp.array([10.0, 20.0, 1000.0]))
    valid, expected = np.array(VALID, bool), np.zeros((4, 3))
    # 1 + ½ (½·2 + ½·3) and 3: nothing of the 100 behind the end; 3 + ½·10 at the window's end
    expected[[0, 1, 3], 0] = 2.25, 3, 8
    # 1 + ½·7 with the value of the final observation alone; 2 + ½ (½·2 + ½·13); 3 + ½·20
    expected[[0, 2, 3], 1] = 4.5, 5.75, 13
    # 5 without the 1000, then ½ (½·2 + ½·5), and a quarter of the next twice
    expected[:, 2] = 7 / 64, 7 / 16, 7 / 4, 5
    np.testing.assert_allclose(np.where(valid, batch.td_target, 0), expected, rtol=1e-6)
    np.testing.assert_allclose(batch.weight, valid * 12 / 10, rtol=1e-6)
    leaves_equal(batch[:2], (rollout.obs, rollout.action))


@pytest.fixture(scope="module")
def collected():
    """A trainer whose policy is not that of new parameters, and a rollout with what follows."""
    trainer = Trainer(SMALL)
    params = jax.tree.map(lambda x: x + 0.3, trainer.state.learner.params)
    state = trainer.state._replace(learner=trainer.state.learner._replace(params=params))
    _, trajectory, is_complete = jax.jit(trainer.collect_trajectory)(state)
    rollout = trajectory.rollout
    assert is_complete and not rollout.valid.all()
    assert rollout.terminated.any() and rollout.truncated.any()
    return trainer, state.learner, rollout, trajectory.last_obs


@pytest.mark.parametrize("q_lambda", [0.0, 0.65, 1.0])
def test_a_batch_has_the_return_of_the_paper(collected, q_lambda):
    """G_t = r_t + γ [λ G_{t+1} + (1 - λ) max_a Q(s_{t+1}, a)] of the acting parameters."""
    trainer, learner, rollout, last_obs = collected
    agent = Agent(replace(SMALL, q_lambda=q_lambda), trainer.algorithm)
    agent.algorithm.config = agent.config
    batch = jax.jit(agent.prepare)(learner, rollout, last_obs)
    obs = jnp.concatenate([rollout.obs, last_obs[None]]).reshape(-1, 4)  # [33 * 4, 4]
    best = jax.jit(trainer.algorithm.predict)(learner.params, obs).max(axis=1).reshape(33, 4)
    expected = np.zeros((32, 4))
    for t, lane in np.ndindex(32, 4):
        t = 31 - t
        following = best[t + 1, lane]
        if t < 31 and not rollout.truncated[t, lane]:
            following = q_lambda * expected[t + 1, lane] + (1 - q_lambda) * following
        goes_on = not rollout.terminated[t, lane]
        expected[t, lane] = rollout.reward[t, lane] + 0.99 * goes_on * following
    valid = np.asarray(rollout.valid)
    got = np.asarray(batch.td_target).reshape(32, 4)
    assert np.ptp(best) > 0.1
    np.testing.assert_allclose(got[valid], expected[valid], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(np.asarray(batch.obs).reshape(32, 4, 4), rollout.obs)
    np.testing.assert_array_equal(np.asarray(batch.weight).reshape(32, 4) > 0, valid)


def test_q_values_from_the_parameters(collected):
    """Q = head(f(f(s))), f(x) = ReLU(LayerNorm(W x + b)), with kernels that start as He's."""
    trainer, learner, rollout, _ = collected
    params, x = jax.tree.map(np.float64, learner.params), np.float64(rollout.obs[0])
    for i in range(2):
        layer, norm = (params["torso"][name][i] for name in ("layers", "norms"))
        x = x @ layer["kernel"] + layer["bias"]
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
        x = np.maximum(x * norm["scale"] + norm["bias"], 0)
    expected = x @ params["head"]["kernel"] + params["head"]["bias"]
    q_values = trainer.algorithm.predict(learner.params, rollout.obs[0])
    np.testing.assert_allclose(q_values, expected, rtol=1e-4)
    start = trainer.state.learner.params["torso"]["layers"][1]["kernel"]
    np.testing.assert_allclose(start.std(), (2 / 120) ** 0.5, rtol=0.05)


# --- Loss and steps -------------------------------------------------------------------------------

HAND_BATCH = TargetBatch(
    obs=jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
    action=jnp.array([0, 1, 1]),
    td_target=jnp.array([3.0, 2.0, 9.0]),
    weight=jnp.array([2.0, 1.0, 0.0]),
)


def test_loss_and_gradient_by_hand():
    # Q(s, a) is 1 and -1: errors of 2 and 3, without the row of weight 0
    learn = jax.jit(jax.value_and_grad(linear_algorithm(pqn).loss_fn, has_aux=True))
    (loss, metrics), gradient = learn(PARAMS, HAND_BATCH)
    np.testing.assert_allclose(loss, (2 * 2**2 + 3**2) / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["td_loss"], loss)
    np.testing.assert_allclose(metrics["q_values"], (2 * 1 - 1) / 3, rtol=1e-6)
    np.testing.assert_allclose(gradient["w"], [[-2 * 2 * 2 / 3, 0], [0, -2 * 3 / 3]], rtol=1e-6)
    nonsense = HAND_BATCH._replace(
        obs=HAND_BATCH.obs.at[2].set(jnp.array([-70.0, 1e3])),
        action=HAND_BATCH.action.at[2].set(0),
        td_target=HAND_BATCH.td_target.at[2].set(1e6),
    )
    leaves_equal(learn(PARAMS, HAND_BATCH), learn(PARAMS, nonsense))
    algorithm = linear_algorithm(pqn)
    state = pqn.LearnerState(PARAMS, algorithm.optimizer.init(PARAMS))
    state, _ = algorithm.learn(state, HAND_BATCH)
    np.testing.assert_allclose(state.params["w"], PARAMS["w"] - gradient["w"], rtol=1e-6)
    np.testing.assert_allclose(state.opt_state[0].trace["w"], gradient["w"], rtol=1e-6)


@pytest.mark.parametrize("anneal", [True, False])
def test_steps_of_radam_by_hand(anneal):
    """The first steps of RAdam are those of the mean gradient, here one cut to a length of 10."""
    config = replace(SMALL, learning_rate=0.1, anneal_lr=anneal)
    optimizer = Algorithm(config, VECTOR, TWO).optimizer
    params = {"x": jnp.zeros(2)}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for number in range(4):
        change, state = update({"x": jnp.array([30.0, 40.0])}, state, params)
        step_size = 0.1 * (1 - anneal * number / 12)  # 440 env steps are 3 rollouts, and a rest
        np.testing.assert_allclose(change["x"], -step_size * np.array([6, 8]), rtol=1e-5)


def learn(learner, minibatch):
    """Write down which rows came, at the place of this update."""
    count, seen = learner
    metrics = {"td_loss": minibatch.weight.sum()}
    return (count + 1, seen.at[count].set(minibatch.td_target)), metrics


def test_every_epoch_learns_from_each_minibatch(monkeypatch):
    rows = jnp.array([[[2, 0], [1, 3]], [[3, 2], [0, 1]], [[1, 0], [2, 3]]])
    monkeypatch.setattr(pqn, "shuffled_rows", lambda *_: rows)
    value = jnp.array([1.0, 2.0, 4.0, 8.0])
    batch = TargetBatch(value, value, value, jnp.ones(4))
    trainer = object.__new__(Trainer)
    trainer.config = SimpleNamespace(update_epochs=3, num_minibatches=2)
    trainer.agent = SimpleNamespace(learn=learn, prepare=lambda *_: batch)
    learner = jnp.int32(0), jnp.zeros((6, 2))
    metrics = {"td_loss": jnp.float32(100), "charts/updates": jnp.float32(7)}
    state = pqn.TrainState(learner, (), jax.random.key(0), jnp.int32(0))
    state, metrics = trainer.learn_trajectory(state, metrics, Trajectory((), ()))
    assert state.learner[1].tolist() == [[4, 1], [2, 8], [8, 4], [1, 2], [2, 1], [4, 8]]
    assert metrics == {"td_loss": 112, "charts/updates": 13}
    assert state.key != jax.random.key(0), "else the first action would be drawn as the rows were"


# --- Acting ---------------------------------------------------------------------------------------


def test_each_environment_draws_its_own_exploration():
    config = Config(total_timesteps=1_000, exploration_fraction=0.5, num_steps=2)
    algorithm = Algorithm(config, VECTOR, spaces.Discrete(4))
    agent, learner = Agent(config, algorithm), algorithm.init(jax.random.key(0))
    obs = jnp.ones((8_000, 4))
    q_values = algorithm.predict(learner.params, obs[:1])[0]
    best = q_values.argmax()
    # ε falls from 1 to 0.05 over 500 steps; a quarter of the uniform actions is the best one.
    for step, epsilon in ((0, 1.0), (250, 0.525), (500, 0.05), (1_000, 0.05)):
        action, extras = agent.sample(learner, obs, jnp.int32(step), jax.random.key(step))
        np.testing.assert_allclose((action != best).mean(), 0.75 * epsilon, atol=0.02)
        np.testing.assert_allclose(extras, q_values.max(), rtol=1e-6)
    assert (agent.predict(learner, obs, jax.random.key(0)) == best).all()


# --- Runs -----------------------------------------------------------------------------------------


def test_counts_are_exact_and_a_cut_rollout_teaches_nothing():
    trainer = Trainer(SMALL)
    training = trainer()
    for _ in range(3):
        next(training)
        logs = next(training)["logs"]
        assert logs["charts/updates"] == 4 and 0 <= logs["losses/td_loss"] < np.inf
    learner = jax.tree.map(np.array, trainer.state.learner)
    rest = list(training)
    assert int(trainer.state.step) == 440
    assert rest[-1]["logs"]["charts/updates"] == 0
    leaves_equal(learner, trainer.state.learner)


def test_rows_without_a_transition_teach_nothing():
    trainer = Trainer(replace(SMALL, learning_rate=1e-2))
    trainer.env = NonsenseEnv(trainer.env.env_id, trainer.env.backend)

    @jax.jit
    def train(nonsense):
        trainer.env.nonsense = nonsense
        state, metrics = trainer.run_iterations(trainer.state, 3)
        return state.learner, metrics

    leaves_equal(train(1.5), train(-1e4))


def test_the_value_goes_on_after_a_time_limit_and_not_after_an_end(monkeypatch):
    # Three steps of reward 1: then nothing, or the value of an endless episode.
    use_env(monkeypatch, pqn, TimerJaxEnv(3))
    config = Config(total_timesteps=40_960, gamma=0.8, log_frequency=40_960, num_steps=32)
    trainer = Trainer(config)
    list(trainer())
    q_values = trainer.algorithm.predict(trainer.state.learner.params, jnp.eye(4))
    expected = np.array([[1 / (1 - 0.8), 1, 1.8, 2.44]] * 2).T
    np.testing.assert_allclose(q_values, expected, atol=0.15)


def test_runs_on_atari_with_the_preset():
    config = Config(env_id="Breakout-v5", **PRESETS["atari"])
    assert (config.num_envs, config.num_steps, config.num_minibatches) == (128, 32, 32)
    small = dict(num_envs=2, num_steps=4, num_minibatches=2, total_timesteps=16, log_frequency=8)
    trainer = Trainer(replace(config, **small))
    logs = [row["logs"] for row in trainer()]
    assert trainer.env.observation_space.shape == (4, 84, 84)
    cnn = trainer.state.learner.params["encoder"]["cnns"][0]
    assert [cnn["layers"][i]["norm"]["scale"].shape for i in range(3)] == [(32,), (64,), (64,)]
    assert cnn["norm"]["scale"].shape == (512,)
    losses = [row["losses/td_loss"] for row in logs if "losses/td_loss" in row]
    assert losses and np.isfinite(losses).all()


@pytest.mark.learning
@pytest.mark.slow
def test_learns_cartpole():
    config = Config(num_envs=8, num_steps=32, total_timesteps=122_880, q_lambda=0.4)
    trainer = Trainer(config)
    # 12 seeds gave 391 to 500; some fall again, and their last policies had 140 to 500. Targets
    # without a bootstrap gave 23 over 2, and with a wrong sign before it 39 and 122; bootstraps
    # behind terminations, with 264 and 326, are told by the targets above.
    assert best_return(trainer) >= 300
    assert trainer.evaluate(20)["logs"]["charts/evaluation_return"] >= 100
