"""Rollouts against stepping one by one; minibatches of all rows, each once a pass."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from algos.ppo import Config, Trainer
from common import rollout as module
from common.envs.env import NOT_FINITE
from common.rollout import RolloutBatch, collect_rollout, take_minibatch

# --- shuffled_rows --------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=(1, 2, 3))
def shuffled_rows(key, update_epochs, num_minibatches, size):
    return module.shuffled_rows(key, update_epochs, num_minibatches, size)


@pytest.mark.parametrize(
    ("size", "num_minibatches"),
    [(1, 1), (2, 2), (3, 1), (7, 7), (8, 4), (100, 5), (4096, 32), (4097, 17), (6000, 4)],
)
def test_every_pass_is_a_permutation(size, num_minibatches):
    rows = np.asarray(shuffled_rows(jax.random.key(0), 3, num_minibatches, size))
    assert rows.shape == (3, num_minibatches, size // num_minibatches)
    assert rows.dtype == np.int32
    passes = rows.reshape(3, size)
    np.testing.assert_array_equal(np.sort(passes, axis=1), [np.arange(size)] * 3)
    if size >= 100:
        other = shuffled_rows(jax.random.key(1), 3, num_minibatches, size).reshape(3, size)
        orders = np.concatenate([passes, other])
        assert len(np.unique(orders, axis=0)) == 6
        # Rows that stay where they were, or where another pass has them: one of each is expected.
        same = [(a == b).sum() for i, a in enumerate(orders) for b in [*orders[:i], range(size)]]
        assert max(same) < 9


@pytest.mark.parametrize(("size", "largest_packed"), [(16, 4096), (13, 4096), (16, 8)])
def test_every_row_comes_at_every_place_equally_often(size, largest_packed, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_PACKED", largest_packed)
    keys = jax.random.split(jax.random.key(0), 4000)
    rows = jax.jit(jax.vmap(lambda key: module.shuffled_rows(key, 2, 1, size)))(keys)
    rows = np.asarray(rows)[:, :, 0]  # [keys, passes, size]
    place = rows.argsort(axis=-1)
    for number in (0, 1, size // 2, size - 1):
        for pass_ in range(2):
            counts = np.bincount(place[:, pass_, number], minlength=size)
            assert stats.chisquare(counts).pvalue > 1e-4
    before = (place[..., 0] < place[..., 1]).sum()
    assert stats.binomtest(int(before), 8000).pvalue > 1e-4
    # The place in one pass says nothing of the place in the next.
    table = np.zeros((size, size))
    np.add.at(table, (place[:, 0, 0], place[:, 1, 0]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-4


# --- take_minibatch -------------------------------------------------------------------------------


def make_batch(weight, **changes):
    number = jnp.arange(float(len(weight)))
    fields = dict.fromkeys(RolloutBatch._fields, number) | changes
    obs = {"a": number, "b": jnp.stack([number, -number], axis=1)}
    return RolloutBatch(**fields | {"obs": obs, "weight": jnp.float32(weight)})


def test_take_minibatch():
    batch = make_batch([1.5, 0, 1.5, 0, 1.5, 1.5], value=jnp.arange(6) * 10.0)
    minibatch = take_minibatch(batch, jnp.array([4, 1, 0, 3]))
    np.testing.assert_array_equal(minibatch.obs["b"], [[4, -4], [1, -1], [0, 0], [3, -3]])
    assert minibatch.value.tolist() == [40, 10, 0, 30]
    assert minibatch.action.tolist() == minibatch.advantages.tolist() == [4, 1, 0, 3]
    np.testing.assert_allclose(minibatch.weight, [2, 0, 2, 0], rtol=1e-6)


def test_weights_of_a_minibatch_have_mean_1():
    rng = np.random.default_rng(0)
    batch = make_batch(rng.random(64) < 0.3)
    for rows in rng.permutation(64).reshape(4, 16):
        weight = np.asarray(take_minibatch(batch, rows).weight)
        np.testing.assert_allclose(weight.mean(), 1, rtol=1e-6)
        np.testing.assert_array_equal(weight > 0, np.asarray(batch.weight)[rows] > 0)
        assert len(set(weight[weight > 0])) == 1


def test_a_minibatch_without_valid_rows_weighs_nothing():
    batch = make_batch([0, 1, 0, 1, 0])
    assert take_minibatch(batch, jnp.array([0, 2, 4])).weight.tolist() == [0, 0, 0]


# --- collect_rollout ------------------------------------------------------------------------------

SMALL = Config(env_id="gymnax/CartPole-v1", num_steps=32, total_timesteps=176, log_frequency=128)


@pytest.fixture(scope="module")
def trainer():
    return Trainer(SMALL)


@pytest.fixture(scope="module")
def collect(trainer):
    """collect_rollout with environments that fail at a count of env steps, if at any."""

    def run(state, fail_at):
        def step_and_fail(state):
            state, row = trainer._run_collect(state)
            fault = jnp.where(state.step == fail_at, NOT_FINITE, state.env.fault)
            return state._replace(env=state.env._replace(fault=fault)), row

        steps_left = (SMALL.total_timesteps - state.step) // SMALL.num_envs
        return collect_rollout(trainer.env, step_and_fail, state, SMALL.num_steps, steps_left)

    compiled = jax.jit(run)
    return lambda state, fail_at=-1: compiled(state, fail_at)


def copied(tree):
    return jax.tree.map(lambda x: np.array(jax.random.key_data(x) if is_key(x) else x), tree)


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, copied(a), copied(b))


def test_a_rollout_equals_stepping_one_by_one(trainer, collect):
    step, stepped, rows = jax.jit(trainer._run_collect), trainer.state, []
    for _ in range(32):
        stepped, row = step(stepped)
        rows.append(row)
    state, rollout, is_complete = collect(trainer.state)
    assert is_complete and state.step == 32 * 4
    expected = jax.tree.map(lambda *x: np.stack(x), *rows)
    for got, wanted in zip(*map(jax.tree.leaves, (rollout, expected)), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert_equal(state.key, stepped.key)
    np.testing.assert_allclose(state.env.obs, stepped.env.obs, rtol=1e-5, atol=1e-6)
    assert rollout.obs.shape == (32, 4, 4) and rollout.extras[0].shape == (32, 4)
    ended = np.asarray(rollout.terminated | rollout.truncated)
    assert ended[:-1].any()
    np.testing.assert_array_equal(rollout.valid[1:], ~ended[:-1])
    np.testing.assert_array_equal(rollout.reward, rollout.valid.astype(np.float32))


def test_rollouts_go_on_where_the_last_one_stopped(collect, trainer):
    middle, first, _ = collect(trainer.state)
    _, second, _ = collect(middle)
    np.testing.assert_array_equal(second.obs[0], middle.env.obs)
    np.testing.assert_array_equal(second.valid[0], ~(first.terminated | first.truncated)[-1])


def test_total_timesteps_cuts_the_last_rollout(trainer, collect):
    state, _, _ = collect(trainer.state)
    _, whole, _ = collect(state._replace(step=jnp.int32(0)))
    state, rollout, is_complete = collect(state)
    assert not is_complete and state.step == 176
    length = (176 - 128) // 4
    for x, y in zip(*map(jax.tree.leaves, (rollout, whole)), strict=True):
        np.testing.assert_array_equal(x[:length], y[:length])
        assert not x[length:].any()
    assert rollout.obs[length - 1].all()
    state, rollout, is_complete = collect(state)
    assert not is_complete and state.step == 176
    assert not any(x.any() for x in jax.tree.leaves(rollout))


@pytest.mark.parametrize("steps", [1, 5, 32])
def test_a_failure_ends_the_rollout(steps, trainer, collect):
    state, rollout, is_complete = collect(trainer.state, fail_at=4 * steps)
    assert not is_complete and state.step == 4 * steps
    assert rollout.obs[:steps].any(axis=(1, 2)).all()
    assert not any(x[steps:].any() for x in jax.tree.leaves(rollout))
    state, rollout, is_complete = collect(state)
    assert not is_complete and state.step == 4 * steps
    assert not any(x.any() for x in jax.tree.leaves(rollout))


def test_nothing_is_learned_from_an_incomplete_rollout(trainer):
    run = jax.jit(trainer.run_iterations)
    learned, metrics = run(trainer.state, 1)
    assert learned.step == 128 and metrics["charts/updates"] == 16
    changed = jax.tree.map(
        lambda a, b: (a != b).any(), trainer.state.learner.params, learned.learner.params
    )
    assert changed["value_head"]["kernel"] and changed["policy_head"]["linear"]["kernel"]
    cut, metrics = run(learned, 3)
    assert cut.step == 176 and metrics["charts/updates"] == 0
    assert_equal(cut.learner, learned.learner)
    failed = learned._replace(env=learned.env._replace(fault=jnp.int32(NOT_FINITE)))
    stopped, metrics = run(failed, 3)
    assert stopped.step == 128 and metrics["charts/updates"] == 0
    assert_equal(stopped.learner, learned.learner)
