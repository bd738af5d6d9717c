"""DDPG, TD3, SAC and discrete SAC together: actions, counts, rows, seeds, and resumed runs."""

import functools
import math
from dataclasses import replace
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from off_policy import ACTION_SPACE, OBS_SPACE, leaves_differ, random_batch, relu_network
from scipy import special, stats
from toy_envs import ReachJaxEnv, TimerJaxEnv, use_env

from algos import ddpg, sac, sac_discrete, td3
from common.normalize import RunningStats

from common.run.checkpoint import Checkpoints
from common.run.seeds import batch_seeds, state_of_seed

CONTINUOUS = [ddpg, td3, sac]
ALGORITHMS = [*CONTINUOUS, sac_discrete]
LOW, HIGH = ReachJaxEnv.action_space.low, ReachJaxEnv.action_space.high
SMALL = dict(num_envs=4, total_timesteps=240, learning_starts=82, log_frequency=120, batch_size=8)
SMALL |= dict(updates_per_step=0.5, buffer_size=1_000)


def each(modules):
    return pytest.mark.parametrize("module", modules, ids=lambda module: module.__name__)


def toy_trainer(module, **options):
    """A Trainer of a toy environment whose episodes have three steps."""
    env = TimerJaxEnv(3) if module is sac_discrete else ReachJaxEnv()
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_env(monkeypatch, module, env)
        return module.Trainer(module.Config(**SMALL | options))


@functools.cache
def finished_toy(module):
    """A Trainer at the end of its run with normalised observations, and its log_data."""
    trainer = toy_trainer(module, normalize_obs=True, gamma=0.9, n_step=2)
    return trainer, list(trainer())


@functools.cache
def pendulum_trainer(module):
    """A Trainer of a JAX environment, whose program serves every seed."""
    return module.Trainer(module.Config(env_id="gymnax/Pendulum-v1", **SMALL))


def restart(trainer, state) -> None:
    """Go on from copies of one kind, bound to no device, so that one program serves them all."""
    trainer.state = jax.tree.map(jnp.array, jax.device_get(state))


# --- counts and logs ------------------------------------------------------------------------------


@each(ALGORITHMS)
def test_log_data_and_counts(module):
    trainer, log_data = finished_toy(module)
    assert int(trainer.state.step) == 240
    assert [d["log_type"] for d in log_data] == ["collect", "train"] * 2
    assert [d["sample_step"] for d in log_data] == [120, 120, 240, 240]
    logs = [d["logs"] for d in log_data]
    assert all(np.isfinite(list(log.values())).all() for log in logs)
    # Half of the 120 - 82 and of the 240 - 82 steps
    assert [log["charts/updates"] for log in logs[1::2]] == [19, 60]
    losses = {name for name in logs[1] if name.startswith("losses/")}
    assert losses >= {"losses/critic_loss", "losses/actor_loss", "losses/q_values"}
    learner = trainer.state.learner
    assert learner.critic.opt_state[0].count == 79
    assert learner.actor.opt_state[0].count == (40 if module is td3 else 79)
    assert logs[2]["charts/episodic_return"] == logs[2]["charts/episodic_length"] == 3


@pytest.mark.parametrize(("module", "expected"), [(ddpg, [19, 60]), (td3, [10, 30])])
def test_updates_of_the_policy_are_counted(module, expected):
    # Updates 0 to 18, then 19 to 78: TD3's policy moves at the even ones.
    _, log_data = finished_toy(module)
    assert [d["logs"]["charts/actor_updates"] for d in log_data[1::2]] == expected


@each([ddpg, td3])
def test_the_logged_loss_of_the_policy_is_the_mean_of_its_own_updates(module, monkeypatch):
    trainer = toy_trainer(module)
    sums = {"actor_loss": 9.0, "charts/actor_updates": 3.0}
    sums |= {"critic_loss": 12.0, "charts/updates": 6.0}

    def run(state, num_iterations):
        return state._replace(step=state.step + 4 * num_iterations), dict(sums)

    monkeypatch.setattr(trainer, "compiled_run", run)
    logs = [log_data["logs"] for log_data in trainer()][1]
    assert logs["losses/actor_loss"] == 3 and logs["losses/critic_loss"] == 2


@each(ALGORITHMS)
def test_the_first_step_of_adam_is_the_learning_rate(module):
    trainer, _ = finished_toy(module)
    optimizer, params = trainer.algorithm.optimizer, {"w": jnp.zeros(1)}
    updates, _ = optimizer.update({"w": jnp.ones(1)}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], -trainer.config.learning_rate, rtol=1e-5)


@pytest.mark.parametrize("num_envs", [1, 4, 64])
@pytest.mark.parametrize("updates_per_step", [0.1, 0.5, 1.0, 2.5])
def test_updates_are_exactly_what_the_steps_imply(num_envs, updates_per_step):
    trainer = toy_trainer(
        sac,
        num_envs=num_envs,
        total_timesteps=640,
        learning_starts=130,
        log_frequency=128,
        updates_per_step=updates_per_step,
    )

    trainer._run_collect = lambda state: state._replace(step=state.step + num_envs)
    trainer._run_train = lambda state: (state, {"charts/updates": jnp.ones(())})
    counted = [d["logs"]["charts/updates"] for d in trainer() if d["log_type"] == "train"]
    steps = range(128, 641, 128)
    expected = [math.floor(Fraction(updates_per_step) * max(step - 130, 0)) for step in steps]
    if updates_per_step == 0.1:
        expected = [max(step - 130, 0) // 10 for step in steps]
    assert np.cumsum(counted).tolist() == expected


# --- actions --------------------------------------------------------------------------------------


@functools.cache
def fresh_agent(module):
    """An Agent of networks that have not learned, and its learner's state."""
    config = module.Config(learning_starts=100)
    algorithm = module.Algorithm(config, OBS_SPACE, ACTION_SPACE)
    state = algorithm.init(jax.random.key(0), jnp.zeros((1, 3)))
    return module.Agent(config, algorithm, ACTION_SPACE), state


@each(CONTINUOUS)
def test_actions_are_uniform_at_first(module):
    agent, state = fresh_agent(module)
    noise = jax.random.normal(jax.random.key(3), (4_000, 2))
    action = np.asarray(agent.sample(state, jnp.ones((4_000, 3)), 99, noise))
    for i in range(2):
        assert stats.kstest(action[:, i], stats.uniform(-1, 2).cdf).pvalue > 1e-3
    assert stats.pearsonr(*action.T).pvalue > 1e-3
    assert stats.pearsonr(action[1:, 0], action[:-1, 0]).pvalue > 1e-3


@each([ddpg, td3])
@pytest.mark.parametrize("exploration_noise", [0.0, 0.5])
def test_actions_follow_the_policy_and_the_noise_later(module, exploration_noise):
    agent, state = fresh_agent(module)
    config = replace(agent.config, exploration_noise=exploration_noise)
    agent = module.Agent(config, agent.algorithm, ACTION_SPACE)
    obs, noise = np.random.default_rng(2).normal(size=(2, 64, 3)).astype(np.float32)
    action = np.asarray(agent.sample(state, obs, 100, noise[:, :2]))
    mean = np.tanh(relu_network(state.actor.params, obs))
    expected = np.clip(mean + exploration_noise * noise[:, :2], -1, 1)
    np.testing.assert_allclose(action, expected, atol=1e-5)
    assert (np.abs(action) == 1).any() == (exploration_noise > 0)


@each(CONTINUOUS)
def test_evaluation_plays_the_policy_without_noise(module):
    agent, state = fresh_agent(module)
    obs = np.random.default_rng(2).normal(size=(64, 3)).astype(np.float32)
    mean = np.tanh(relu_network(state.actor.params, obs)[:, :2])
    expected = np.array([1, 0.25]) + np.array([2, 0.25]) * mean
    for key in range(2):
        action = agent.predict(state, obs, jax.random.key(key))
        np.testing.assert_allclose(action, expected, atol=1e-5)
    actions = agent.env_action(jnp.float32([[-1, 1], [1, -1], [0, 0]]))
    np.testing.assert_allclose(actions, [[-1, 0.5], [3, 0], [1, 0.25]])


# --- rows -----------------------------------------------------------------------------------------


@each(ALGORITHMS)
def test_stored_rows_follow_the_episodes(module):
    trainer, _ = finished_toy(module)
    rows = trainer.replay.in_time_order(trainer.state.replay)
    row = np.arange(60)[:, None] % 4 + np.zeros((1, 4))  # three steps and the ignored one
    np.testing.assert_array_equal(rows.valid, row != 3)
    np.testing.assert_array_equal(rows.terminated | rows.truncated, row == 2)
    np.testing.assert_array_equal(rows.reward, row != 3)
    assert rows.terminated.any() and rows.truncated.any()


@each(ALGORITHMS)
def test_a_time_limit_bootstraps_and_a_termination_does_not(module):
    # Two-step returns: one step is left in the third row of an episode.
    trainer, _ = finished_toy(module)
    time, lane = (x.ravel() for x in np.mgrid[:57, :4])
    batch = trainer.replay.gather(trainer.state.replay, time, lane)
    rows = trainer.replay.in_time_order(trainer.state.replay)
    ending = np.stack([rows.terminated[t // 4 * 4 + 2, i] for t, i in zip(time, lane, strict=True)])
    row = time % 4
    np.testing.assert_array_equal(batch.weight, row != 3)
    discount = np.where(row == 0, 0.81, np.where(ending, 0, np.where(row == 1, 0.81, 0.9)))
    is_valid = row != 3
    np.testing.assert_allclose(batch.discount[is_valid], discount[is_valid], rtol=1e-6)
    reward = np.where(row == 2, 1, 1.9)
    np.testing.assert_allclose(batch.reward[is_valid], reward[is_valid], rtol=1e-6)
    if module is not sac_discrete:  # obs[2] counts the steps: the true final observation is 3
        steps_later = np.minimum(row + 2, 3)
        np.testing.assert_array_equal(batch.next_obs[is_valid, 2], steps_later[is_valid])


@each(CONTINUOUS)
def test_actions_reach_the_environment_within_its_bounds(module):
    # The next observation tells the action that the environment was given.
    trainer, _ = finished_toy(module)
    rows = trainer.replay.in_time_order(trainer.state.replay)
    acted = np.asarray(rows.valid)[:-1]
    given, stored = rows.obs[1:, :, :2][acted], np.asarray(rows.action)[:-1][acted]
    np.testing.assert_allclose(given, LOW + (stored + 1) / 2 * (HIGH - LOW), atol=1e-5)
    assert np.abs(stored).max() <= 1 and stored.min() < -0.5 and stored.max() > 0.5


def collected(module, **options):
    """Stored actions [T, N, A] and noise [T, N, A] of 250 steps in 64 environments."""
    sizes = dict(num_envs=64, total_timesteps=16_000, buffer_size=16_000)
    trainer = toy_trainer(module, **sizes, **options)

    def step(state, _):
        state = trainer._run_collect(state)
        return state, state.noise

    state, noise = jax.jit(lambda state: jax.lax.scan(step, state, length=250))(trainer.state)
    return np.asarray(state.replay.storage.action), np.asarray(noise)


@each([td3, sac])
def test_the_warm_up_is_uniform(module):
    action, _ = collected(module, learning_starts=16_000)
    for i in range(2):
        assert stats.kstest(action[..., i].ravel(), stats.uniform(-1, 2).cdf).pvalue > 1e-3
    pairs = {
        "dimensions": (action[..., 0], action[..., 1]),
        "environments": (action[:, 1:], action[:, :-1]),
        "steps": (action[1:], action[:-1]),
    }
    for name, (first, second) in pairs.items():
        assert stats.pearsonr(first.ravel(), second.ravel()).pvalue > 1e-3, name


@each([ddpg, sac])
def test_noise_is_correlated_in_time(module):
    # In the warm-up, which ends in the middle, the action is a function of the noise alone.
    action, noise = collected(module, learning_starts=8_000, noise_correlation=0.9)
    np.testing.assert_allclose(action[:125], 2 * stats.norm.cdf(noise[:125]) - 1, atol=1e-5)
    assert np.abs(action[125:] - special.erf(noise[125:] / math.sqrt(2))).max() > 0.1
    correlation = stats.pearsonr(noise[1:].ravel(), noise[:-1].ravel()).statistic
    np.testing.assert_allclose(correlation, 0.9, atol=0.01)
    np.testing.assert_allclose(noise.std(), 1, atol=0.05)


def test_the_warm_up_of_discrete_actions_is_uniform():
    trainer = toy_trainer(sac_discrete, num_envs=64, total_timesteps=960, learning_starts=960)
    step, state = jax.jit(trainer._run_collect), trainer.state
    for _ in range(15):
        state = step(state)
    action = np.asarray(state.replay.storage.action)[:15]
    assert stats.binomtest(int(action.sum()), action.size).pvalue > 1e-3


# --- normalised observations ----------------------------------------------------------------------


@each(ALGORITHMS)
def test_statistics_are_those_of_the_valid_rows(module):
    trainer, _ = finished_toy(module)
    rows = trainer.replay.in_time_order(trainer.state.replay)
    seen = np.float64(np.asarray(rows.obs)[np.asarray(rows.valid)])
    stats_of_obs = trainer.state.learner.normalizer.obs
    assert stats_of_obs.num_rows == len(seen) == 180
    np.testing.assert_allclose(stats_of_obs.mean, seen.mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(stats_of_obs.variance, seen.var(axis=0), rtol=1e-3, atol=1e-6)


@each(ALGORITHMS)
def test_every_observation_is_normalized(module, monkeypatch):
    trainer, _ = finished_toy(module)
    agent, size = trainer.agent, trainer.env.observation_space.shape[0]
    known = RunningStats(jnp.float32(9), jnp.full(size, 1.0), jnp.full(size, 4.0))
    normalizer = trainer.state.learner.normalizer._replace(obs=known)
    state, seen = trainer.state.learner._replace(normalizer=normalizer), []
    predict, learn = agent.algorithm.predict, lambda state, batch, *_: (state, batch)
    monkeypatch.setattr(agent.algorithm, "predict", lambda *x: seen.append(x[1]) or predict(*x))
    monkeypatch.setattr(agent.algorithm, "learn", learn)
    obs = jnp.linspace(-5, 5, 4 * size).reshape(4, size)
    last = jax.random.key(0) if module is sac_discrete else trainer.state.noise
    agent.predict(state, obs, jax.random.key(0))
    agent.sample(state, obs, 500, last)
    batch = random_batch(0)._replace(obs=obs, next_obs=2 * obs - 1)
    arguments = {ddpg: 1, td3: 2, sac: 1, sac_discrete: 0}[module] * [()]
    _, batch = agent.learn(state, batch, *arguments)
    for got in (*seen, batch.obs, batch.next_obs / 2):
        np.testing.assert_allclose(got, (obs - 1) / 2, rtol=1e-6)
    assert len(seen) == 2


# --- seeds, resumed runs, backends ----------------------------------------------------------------


@each(ALGORITHMS)
def test_a_saved_run_goes_on_bit_for_bit_and_a_seed_decides_everything(module, tmp_path):
    trainer = pendulum_trainer(module) if module in (td3, sac) else finished_toy(module)[0]
    restart(trainer, trainer.init_state(jax.random.key(1)))
    checkpoints, training = Checkpoints(tmp_path), trainer()
    next(training), next(training)
    checkpoints.save(120, trainer.state, 0.0)
    assert trainer.state.learner.critic.opt_state[0].count == 19
    list(training)
    whole = jax.device_get(trainer.state)
    restart(trainer, checkpoints.restore(120, trainer.state))
    list(trainer())
    assert_equal(trainer.state, whole)
    restart(trainer, trainer.init_state(jax.random.key(2)))
    list(trainer())
    for name in ("actor", "critic"):
        kernels = [getattr(s.learner, name).params for s in (trainer.state, whole)]
        assert not np.array_equal(*(jax.tree.leaves(params)[0] for params in kernels))
    assert leaves_differ(trainer.state.replay.storage.action, whole.replay.storage.action)
    restart(trainer, trainer.init_state(jax.random.key(1)))
    list(trainer())
    assert_equal(trainer.state, whole)


def assert_equal(first, second) -> None:
    def raw(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    jax.tree.map(lambda x, y: np.testing.assert_array_equal(raw(x), raw(y)), first, second)


@each([td3, sac])
@pytest.mark.slow
def test_a_seed_of_two_learns_what_it_learns_alone(module):
    trainer = pendulum_trainer(module)
    together = module.Trainer(replace(trainer.config, seed=7))
    batch_seeds(together, 2)
    together.state, metrics = together.compiled_run(together.state, 25)
    assert metrics["charts/updates"].tolist() == [9, 9]
    for i, seed in enumerate((7, 8)):
        restart(trainer, trainer.init_state(jax.random.key(seed)))
        alone, _ = trainer.compiled_run(trainer.state, 25)
        learner = state_of_seed(together.state, i).learner
        for got, expected in (
            (learner.actor.params, alone.learner.actor.params),
            (learner.critic.params, alone.learner.critic.params),
            (learner.target_critic, alone.learner.target_critic),
        ):
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), got, expected)


@each(ALGORITHMS)
@pytest.mark.slow
def test_runs_on_envpool(module):
    env_id = "CartPole-v1" if module is sac_discrete else "Pendulum-v1"
    options = dict(
        num_envs=2, total_timesteps=420, log_frequency=420, updates_per_step=0.1, n_step=3
    )
    trainer = module.Trainer(module.Config(env_id=env_id, **SMALL | options))
    logs = {k: v for log_data in trainer() for k, v in log_data["logs"].items()}
    assert int(trainer.state.step) == 420
    assert np.isfinite(list(logs.values())).all()
    if module is sac_discrete:
        return
    # Pendulum never terminates: the returns of the last rows before step 200 are shorter ones.
    rows = trainer.replay.in_time_order(trainer.state.replay)
    assert np.flatnonzero(rows.truncated[:, 0]).tolist() == [199]
    assert not rows.terminated.any()
    time, lane = np.arange(195, 203), np.zeros(8, int)
    batch = trainer.replay.gather(trainer.state.replay, time, lane)
    steps = np.array([3, 3, 3, 2, 1, 1, 3, 3])
    expected = np.where(time == 200, batch.discount, 0.99**steps)
    np.testing.assert_allclose(batch.discount, expected, rtol=1e-5)
    assert batch.weight.tolist() == [1, 1, 1, 1, 1, 0, 1, 1]
    np.testing.assert_array_equal(batch.next_obs, rows.obs[time + steps, 0])
