"""Returns and advantages along time: pure functions, one equation each, time-major [T, B].

Row t + 1 holds the true next observation of row t, at the end of an episode too (see
`common.envs.env`), so `value` has one row more than `reward`: that of the observation after the
last step. `terminated` cuts the value of the next row, `terminated | truncated` cuts the trace. The
row after an end holds no transition; no other row looks at its result.
"""

import chex
import jax.numpy as jnp
from jax import Array, lax


def gae(
    reward: Array, terminated: Array, truncated: Array, value: Array, gamma: float, lambda_: float
) -> Array:
    """Generalized advantage estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438).

        δ_t = r_t + γ (1 - terminated_t) V(s_{t+1}) - V(s_t)
        Â_t = δ_t + γ λ (1 - ended_t) Â_{t+1}                                    (eq. 16)

    Args:
        reward, terminated, truncated: [T, B].
        value: V(s_t) [T + 1, B].
        gamma: discount of one step.
        lambda_: 0 trusts the value of the next step, 1 the rewards of the whole episode.

    Returns:
        advantages [T, B], float32.
    """
    _check_shapes(reward, terminated, truncated, value)
    td_error = reward + gamma * (1.0 - terminated) * value[1:] - value[:-1]  # [T, B]
    trace = gamma * lambda_ * (1.0 - (terminated | truncated))  # [T, B]
    return _backward_sum(td_error, trace)  # [T, B]


def td_lambda_return(
    reward: Array, terminated: Array, truncated: Array, value: Array, gamma: float, lambda_: float
) -> Array:
    """λ-return (Sutton and Barto 2018, section 12.1, http://incompleteideas.net/book/the-book.html).

        G_t = r_t + γ (1 - terminated_t) ((1 - λ_t) V(s_{t+1}) + λ_t G_{t+1})

    with λ_t = λ (1 - ended_t), and V(s_{t+1}) for G_{t+1} at the last row. Arguments as for `gae`;
    returns [T, B].
    """
    _check_shapes(reward, terminated, truncated, value)
    discount = gamma * (1.0 - terminated)  # [T, B]
    mixing = lambda_ * (1.0 - (terminated | truncated))  # [T, B]
    mixing = mixing.at[-1].set(0.0)  # beyond the last row there is only its value
    step = reward + discount * (1.0 - mixing) * value[1:]  # [T, B]
    return _backward_sum(step, discount * mixing)  # [T, B]


def n_step_return(
    reward: Array, terminated: Array, truncated: Array, value: Array, gamma: float, n: int
) -> Array:
    """n-step return (Sutton 1988; Mnih et al. 2016, section 4, https://arxiv.org/abs/1602.01783).

        G_t = Σ_{k<m} γᵏ r_{t+k} + γᵐ (1 - terminated_{t+m-1}) V(s_{t+m})

    where m ≤ n steps are left until the episode or the window ends. Arguments as for `gae`; returns
    [T, B].

    Raises:
        ValueError: n is below 1.
    """
    if n < 1:
        raise ValueError(f"n must be 1 or more, got {n}")
    _check_shapes(reward, terminated, truncated, value)
    bootstrap = gamma * (1.0 - terminated) * value[1:]  # [T, B]
    returns = reward + bootstrap  # [T, B], the 1-step return
    goes_on = ~(terminated | truncated)  # [T, B]
    goes_on = goes_on.at[-1].set(False)

    def lengthen(_: int, returns: Array) -> Array:
        later = jnp.roll(returns, -1, axis=0)  # [T, B], of the next row
        return reward + jnp.where(goes_on, gamma * later, bootstrap)  # [T, B]

    return lax.fori_loop(1, min(n, len(reward)), lengthen, returns)


def _backward_sum(step: Array, trace: Array) -> Array:
    """x_t = step_t + trace_t x_{t+1} with x_T = 0, along the first axis."""

    def combine(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        return earlier[0] + earlier[1] * later[0], earlier[1] * later[1]

    return lax.associative_scan(combine, (step, trace), reverse=True)[0]


def _check_shapes(reward: Array, terminated: Array, truncated: Array, value: Array) -> None:
    chex.assert_equal_shape([reward, terminated, truncated])
    chex.assert_shape(value, (len(reward) + 1, *reward.shape[1:]))
    chex.assert_type([terminated, truncated], bool)
    chex.assert_type([reward, value], jnp.float32)
