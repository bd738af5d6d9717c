"""Action masks: never an unavailable action, in no file, and none in targets, policies or draws."""

import importlib
import math
from functools import partial
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gymnasium import spaces
from scipy import special, stats
from toy_envs import env_config

from algos import dqn, sac_discrete
from common.action_masks import UNAVAILABLE, action_mask, mask_actions
from common.distributions import PolicyHead
from common.envs import make_env
from common.errors import UserError
from common.exploration import random_action
from common.networks import Encoder
from common.normalize import Normalizer
from common.replay import Batch, Transition

from common.run.load import Policy

MASK = spaces.MultiBinary(5)
SPACES = {"Discrete": spaces.Discrete(5), "MultiDiscrete": spaces.MultiDiscrete([2, 3])}


class MaskEnv(gym.Env):
    """Raises where it is given what its last mask ruled out; the final mask rules out everything.

    Of each choice one random action is available, and each other one in half of the cases.
    """

    def __init__(self, action_space: Any, mask_space: Any = MASK, length: int = 7) -> None:
        observation = spaces.Box(-1, 1, (3,), np.float32)
        parts = {"action_mask": mask_space, "observation": observation}
        self.observation_space, self.action_space = spaces.Dict(parts), action_space
        self.length = length

    def _observe(self, ended: bool = False) -> dict:
        sizes = getattr(self.action_space, "nvec", [getattr(self.action_space, "n", 1)])
        parts = []
        for size in sizes:
            part = self.np_random.random(size) < 0.5
            part[self.np_random.integers(size)] = True
            parts.append(part & (not ended))
        self.parts = parts
        mask = np.concatenate(parts).astype(self.observation_space["action_mask"].dtype)
        observation = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return {"action_mask": mask, "observation": observation}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        for choice, part in zip(np.atleast_1d(action), self.parts, strict=True):
            if not part[choice]:
                raise RuntimeError(f"{choice} is not available")
        self.steps += 1
        ended = self.steps == self.length
        return self._observe(ended), float(np.sum(action)), ended, False, {}


for name, space in SPACES.items():
    gym.register(f"Masked{name}-v0", partial(MaskEnv, space))
gym.register(
    "MaskedFloats-v0", partial(MaskEnv, spaces.Discrete(5), spaces.Box(0, 1, (5,), np.float32))
)

OFF_POLICY = dict(learning_starts=100, buffer_size=400, batch_size=16)
ON_POLICY = dict(num_steps=8, num_minibatches=2)
RUNS = {
    "dqn": ("MaskedDiscrete-v0", dict(**OFF_POLICY, evaluation_epsilon=0.5)),
    "sac_discrete": ("MaskedFloats-v0", dict(**OFF_POLICY, normalize_obs=True)),
    "a2c": ("MaskedMultiDiscrete-v0", dict(num_steps=8)),
    "impala": ("MaskedMultiDiscrete-v0", dict(num_steps=8)),
    "ppo": ("MaskedFloats-v0", dict(**ON_POLICY, normalize_obs=True)),
    "ppo_rnn": ("MaskedMultiDiscrete-v0", ON_POLICY),
    "pqn": ("MaskedDiscrete-v0", dict(**ON_POLICY, evaluation_epsilon=0.5)),
}


@pytest.mark.parametrize("algo", RUNS)
@pytest.mark.slow
def test_no_unavailable_action_is_ever_played(algo):
    """In training, in evaluation and from `predict`: the environment raises at the first."""
    env_id, options = RUNS[algo]
    module = importlib.import_module(f"algos.{algo}")
    config = module.Config(env_id=env_id, num_envs=4, total_timesteps=800, **options)
    trainer = module.Trainer(config)
    logs = [row["logs"] for row in trainer()]
    losses = [value for row in logs for name, value in row.items() if "loss" in name]
    assert losses and np.isfinite(losses).all()
    assert trainer.evaluate(20)["logs"]["charts/evaluation_length"] == 7
    policy, env = Policy(trainer, 0), gym.make(env_id)
    for seed in range(5):
        obs, _ = env.reset(seed=seed)
        policy.reset()
        ended = False
        while not ended:
            obs, _, ended, _, _ = env.step(policy.predict(obs))
    trainer.evaluator.close()


def test_a_mask_of_zeros_rules_out_nothing():
    values = jnp.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    mask = jnp.array([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
    masked = mask_actions(values, action_mask({"action_mask": mask}))
    expected = [[1, 2, UNAVAILABLE], [1, 2, 3], [1, 2, 3]]
    np.testing.assert_array_equal(masked, np.float32(expected))
    assert action_mask(values) is None and action_mask({"observation": values}) is None
    assert mask_actions(values, None) is values


def test_random_actions_are_uniform_over_what_is_available():
    mask = jnp.tile(jnp.array([True, False, True, True]), (30_000, 1))
    drawn = np.bincount(random_action(jax.random.key(0), mask.shape, mask), minlength=4)
    assert drawn[1] == 0 and stats.chisquare(drawn[[0, 2, 3]]).pvalue > 1e-3
    free = random_action(jax.random.key(0), (30_000, 4), None)
    np.testing.assert_array_equal(free, jax.random.randint(jax.random.key(0), (30_000,), 0, 4))


def masked_batch(**changes: Any) -> Batch:
    """Two rows; in the first the largest next Q-value is of an unavailable action."""
    mask = jnp.array([[1, 1, 0], [0, 0, 0]])
    features = jnp.array([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])
    obs = {"action_mask": mask, "observation": features}
    fields = dict(obs=obs, action=jnp.array([1, 0]), reward=jnp.array([1.0, 2.0]))
    fields |= dict(discount=jnp.array([0.5, 0.0]), weight=jnp.ones(2), next_obs=obs, extras=())
    return Batch(**fields | changes)


class Features:
    """A network whose Q-values or logits are the observation."""

    def value(self, obs: Any) -> Any:
        return obs["observation"]

    actor = value


def test_the_target_of_dqn_is_the_best_available_value():
    algorithm = object.__new__(dqn.Algorithm)
    algorithm.model = lambda params: Features()
    assert algorithm.td_target((), masked_batch()).tolist() == [1 + 0.5 * 2, 2]
    loss, _ = algorithm.loss_fn((), masked_batch(), jnp.array([2.0, 2.0]))
    np.testing.assert_allclose(loss, (0 + (2 - 3) ** 2) / 2)


def test_the_policy_of_discrete_sac_is_over_available_actions():
    algorithm = sac_discrete.Algorithm(
        sac_discrete.Config(target_entropy=0.5),
        spaces.Dict({"action_mask": spaces.MultiBinary(3), "observation": spaces.Box(-9, 9, (3,))}),
        spaces.Discrete(3),
    )
    batch = masked_batch()
    state = algorithm.init(jax.random.key(0), batch.obs)
    probs = np.asarray(algorithm.predict(state, batch.obs).probs())
    assert probs[0, 2] == 0 and (probs[1] > 0).all()
    q_values = np.asarray(algorithm.value(state, state.target_critic, batch.obs)).min(axis=0)
    soft = (probs[0, :2] * (q_values[0, :2] - np.log(probs[0, :2]))).sum()  # α = 1 at first
    np.testing.assert_allclose(algorithm.td_target(state, batch), [1 + 0.5 * soft, 2], rtol=1e-5)
    expected = 0.5 * (math.log(2) + math.log(3)) / 2
    np.testing.assert_allclose(algorithm.target_entropy(batch), expected, rtol=1e-6)
    grads = jax.grad(lambda actor: algorithm.actor_loss(actor, state, batch)[0])(state.actor.params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_policies_are_those_of_the_available_actions_alone():
    head = PolicyHead(4, spaces.MultiDiscrete([2, 3]), nnx.Rngs(0), scale=1.0)
    features = jax.random.normal(jax.random.key(1), (1, 4))
    logits = np.asarray(head.linear(features))[0]
    policy = head(features, jnp.array([[False, True, True, False, True]]))
    first, second = policy.parts
    assert first.probs().tolist() == [[0, 1]]
    expected = special.softmax(logits[[2, 4]])
    np.testing.assert_allclose(second.probs()[0], [expected[0], 0, expected[1]], rtol=1e-5)
    action = jnp.array([[1, 2]])
    np.testing.assert_allclose(policy.log_prob(action)[0], np.log(expected[1]), rtol=1e-4)
    np.testing.assert_allclose(policy.entropy()[0], stats.entropy(expected), rtol=1e-5)


def test_the_mask_is_no_input_of_the_network():
    space = MaskEnv(spaces.Discrete(5)).observation_space
    encoder = Encoder(space, nnx.Rngs(0))
    obs = {"action_mask": jnp.ones((2, 5), jnp.int8), "observation": jnp.ones((2, 3))}
    assert encoder.num_features == 3
    np.testing.assert_array_equal(encoder(obs), np.ones((2, 3)))


def test_normalisation_leaves_the_mask_alone():
    obs = {"action_mask": jnp.eye(3), "observation": jnp.arange(9.0).reshape(3, 3)}
    normalizer = Normalizer(obs=True, reward=False, gamma=0.99)
    no, zero = jnp.zeros((1, 3), bool), jnp.zeros((1, 3))
    rows = jax.tree.map(lambda x: x[None], obs)
    rollout = Transition(rows, zero, zero, no, no, ~no)
    state, _ = normalizer.update(normalizer.init(obs), rollout)
    seen = normalizer.observe(state, obs)
    np.testing.assert_array_equal(seen["action_mask"], obs["action_mask"])
    np.testing.assert_allclose(seen["observation"].mean(axis=0), 0, atol=1e-6)


BOX = spaces.Box(-1, 1, (5,), np.float32)
REFUSED = {
    "length": (spaces.MultiBinary(4), spaces.Discrete(5), r"MultiBinary\(5\)"),
    "shape": (spaces.MultiBinary([5, 1]), spaces.Discrete(5), "one entry for each action"),
    "parts": (spaces.Tuple([MASK]), spaces.Discrete(5), "one entry for each action"),
    "continuous": (MASK, BOX, "masks Discrete and MultiDiscrete"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mask_that_does_not_fit_is_refused(name):
    mask_space, action_space, message = REFUSED[name]
    gym.register(f"Refused{name}-v0", partial(MaskEnv, action_space, mask_space))
    with pytest.raises(UserError, match=message):
        make_env(env_config(f"Refused{name}-v0"))


def test_nothing_but_a_mask_is_refused():
    class Blind(MaskEnv):
        def __init__(self) -> None:
            super().__init__(spaces.Discrete(5))
            self.observation_space = spaces.Dict({"action_mask": MASK})

    gym.register("Blind-v0", Blind)
    with pytest.raises(UserError, match="add the observation itself"):
        make_env(env_config("Blind-v0"))


@pytest.mark.slow
def test_pgx_2048_plays_legal_actions_only():
    """pgx ends the game with the reward -1 at an illegal action; 2048 itself gives none below 0."""
    config = dqn.Config("pgx/2048", num_envs=4, total_timesteps=400, learning_starts=10_000)
    trainer = dqn.Trainer(config)
    list(trainer())
    env = trainer.env
    state = jax.jit(env.reset)(jax.random.key(0))
    step, ended = jax.jit(env.step), 0
    for key in jax.random.split(jax.random.key(1), 300):
        action = trainer.agent.sample(trainer.state.learner, state.obs, 0, key)
        state, row = step(state, action)
        assert (row.reward >= 0).all()
        ended += int(row.terminated.sum())
    assert ended
