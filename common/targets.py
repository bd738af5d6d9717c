"""Targets, and the losses that belong to them: pure functions, one equation each.

Returns and advantages along time are time-major, [T, B]. Row t + 1 holds the true next observation
of row t, at the end of an episode too (see `common.envs.env`), so `value` has one row more than
`reward`: that of the observation after the last step. `terminated` cuts the value of the next row,
`terminated | truncated` cuts the trace. The row after an end holds no transition; no other row
looks at its result.
"""

from typing import NamedTuple

import chex
import jax.numpy as jnp
from jax import Array, lax

from common import cpu_gradients


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


class VTrace(NamedTuple):
    """What a policy and its value learn from steps of another policy."""

    target: Array  # [T, B] v_s, of the value
    advantages: Array  # [T, B] of the policy


def vtrace(
    ratio: Array,
    reward: Array,
    terminated: Array,
    truncated: Array,
    value: Array,
    gamma: float,
    lambda_: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> VTrace:
    """V-trace (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, section 4.1 and remark 2).

        ρ_t   = min(ρ̄, π(a_t|s_t) / μ(a_t|s_t)),   c_t = λ min(c̄, π(a_t|s_t) / μ(a_t|s_t))
        δ_t   = ρ_t (r_t + γ (1 - terminated_t) V(s_{t+1}) - V(s_t))
        v_t   = V(s_t) + δ_t + γ (1 - ended_t) c_t (v_{t+1} - V(s_{t+1}))           (eq. 1)
        Â_t   = ρ_t (r_t + γ (1 - terminated_t) v_{t+1} - V(s_t))

    with V(s_{t+1}) for v_{t+1} behind the last row, and behind an episode that was truncated.

    Args:
        ratio: π(a_t|s_t) / μ(a_t|s_t) [T, B], of the policy to learn about over the one that acted.
        reward, terminated, truncated, value, gamma: as for `gae`.
        lambda_: λ; 1 is the paper's n-step V-trace.
        rho_bar: ρ̄, which fixes the policy whose value is learned; infinite for π itself.
        c_bar: c̄, how much a later step may count; it changes the speed of learning alone.
    """
    _check_shapes(reward, terminated, truncated, value)
    chex.assert_equal_shape([ratio, reward])
    discount = gamma * (1.0 - terminated)  # [T, B]
    goes_on = 1.0 - (terminated | truncated)  # [T, B]
    rho = jnp.minimum(rho_bar, ratio)  # [T, B]
    c = lambda_ * jnp.minimum(c_bar, ratio)  # [T, B]
    td_error = rho * (reward + discount * value[1:] - value[:-1])  # [T, B]
    correction = _backward_sum(td_error, gamma * goes_on * c)  # [T, B], v_t - V(s_t)
    later = jnp.zeros_like(correction).at[:-1].set(correction[1:])  # [T, B], of the next row
    next_target = value[1:] + goes_on * later  # [T, B]
    advantages = rho * (reward + discount * next_target - value[:-1])  # [T, B]
    return VTrace(target=value[:-1] + correction, advantages=advantages)


def upgo_return(
    reward: Array, terminated: Array, truncated: Array, value: Array, gamma: float
) -> Array:
    """Return that goes on only while it is at least the value: upgoing policy update.

        G_t = r_t + γ (1 - terminated_t) G_{t+1}      if r_{t+1} + γ (1 - terminated_{t+1})
                                                       V(s_{t+2}) ≥ V(s_{t+1}), and not ended_t,
              r_t + γ (1 - terminated_t) V(s_{t+1})   else, and at the last row

    Vinyals et al. 2019, https://doi.org/10.1038/s41586-019-1724-z, Methods, "Value learning".
    Arguments as for `gae`; returns [T, B].
    """
    _check_shapes(reward, terminated, truncated, value)
    td_error = reward + gamma * (1.0 - terminated) * value[1:] - value[:-1]  # [T, B]
    is_better = jnp.zeros(reward.shape).at[:-1].set(td_error[1:] >= 0)  # [T, B], of the next row
    goes_on = 1.0 - (terminated | truncated)  # [T, B]
    return value[:-1] + _backward_sum(td_error, gamma * goes_on * is_better)


def categorical_projection(reward: Array, discount: Array, probs: Array, support: Array) -> Array:
    """Distribution of r + γ Z on the atoms of Z (Bellemare et al. 2017, eq. 7).

        m_i = Σ_j [1 - |clip(r + γ z_j, z_0, z_{M-1}) - z_i| / Δz]_0^1 p_j

    Each atom's mass is shared out between its two neighbours, all of it to one where it falls on
    it; what falls beyond the support stays at its ends. So no mass is lost.

    https://arxiv.org/abs/1707.06887

    Args:
        reward: r [B], of one step or of n.
        discount: γ [B], of as many steps, 0 after a termination.
        probs: p [B, M].
        support: z [M], ascending, with equal distances Δz.

    Returns:
        m [B, M].
    """
    chex.assert_equal_shape([reward, discount])
    chex.assert_shape(probs, (len(reward), len(support)))
    distance = (support[-1] - support[0]) / (len(support) - 1)
    moved = reward[:, None] + discount[:, None] * support  # [B, M]
    place = (jnp.clip(moved, support[0], support[-1]) - support[0]) / distance  # [B, M], in atoms
    lower = jnp.floor(place).astype(jnp.int32)  # [B, M]
    above = probs * (place - lower)  # [B, M], 0 where an atom falls on another
    pairs = jnp.stack([probs - above, above], axis=-1)  # [B, M, 2], for lower and lower + 1
    # One scatter of pairs takes a tenth less of C51's update than two of single numbers.
    size = len(support) + 1  # a pair at the last atom reaches beyond it, with 0
    first = jnp.arange(len(reward))[:, None] * size + lower  # [B, M]
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(2,), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
    )
    empty = jnp.zeros(len(reward) * size, probs.dtype)
    projected = lax.scatter_add(empty, first[..., None], pairs, dimensions, mode="drop")
    return projected.reshape(-1, size)[:, :-1]  # [B, M]


def quantile_huber_loss(quantiles: Array, tau: Array, target: Array, kappa: float = 1.0) -> Array:
    """Σ_i E_j[ρ_τi(y_j - θ_i)], the quantile Huber loss (Dabney et al. 2018, eq. 10).

        ρ_τ(u) = |τ - 1{u < 0}| L_κ(u) / κ
        L_κ(u) = ½ u² where |u| ≤ κ, else κ (|u| - ½ κ)

    https://arxiv.org/abs/1710.10044; divided by κ as in https://arxiv.org/abs/1806.06923 (eq. 3).

    Args:
        quantiles: θ [B, N], estimated values of the quantiles.
        tau: fractions [N] or [B, N] between 0 and 1 that they are to be the quantiles of.
        target: y [B, N'], samples or quantiles of the target distribution.
        kappa: κ, beyond which the loss is linear; above 0.

    Returns:
        loss [B].
    """
    chex.assert_rank([quantiles, target], 2)
    tau = jnp.broadcast_to(tau, quantiles.shape)  # [B, N]
    if cpu_gradients.are_for(quantiles) and target.shape[1] > cpu_gradients.FEW_TARGETS:
        return cpu_gradients.quantile_huber_loss(quantiles, tau, target, kappa)
    error = target[:, None, :] - quantiles[:, :, None]  # [B, N, N']
    size = jnp.abs(error)
    huber = jnp.where(size <= kappa, 0.5 * error**2, kappa * (size - 0.5 * kappa))  # [B, N, N']
    side = jnp.abs(tau[:, :, None] - (error < 0))  # [B, N, N']
    return (side * huber / kappa).mean(axis=2).sum(axis=1)  # [B]


def value_rescale(value: Array, epsilon: float = 1e-3) -> Array:
    """h(x) = sign(x) (√(|x| + 1) - 1) + ε x (Pohlen et al. 2018, https://arxiv.org/abs/1805.11593).

    Any shape. The difference is written as |x| / (√(|x| + 1) + 1), which loses no digits.
    """
    size = jnp.abs(value)
    return jnp.sign(value) * size / (jnp.sqrt(size + 1) + 1) + epsilon * value


def value_unrescale(value: Array, epsilon: float = 1e-3) -> Array:
    """h⁻¹(x) = sign(x) (((√(1 + 4 ε (|x| + 1 + ε)) - 1) / 2 ε)² - 1), undoing `value_rescale`.

    Any shape. With s = |x| + 1 + ε, the base of the square is written as 2 s / (√(1 + 4 ε s) + 1).
    """
    shifted = jnp.abs(value) + 1 + epsilon
    root = 2 * shifted / (jnp.sqrt(1 + 4 * epsilon * shifted) + 1)
    return jnp.sign(value) * (root - 1) * (root + 1)


def n_step_rescaled_return(
    reward: Array, terminated: Array, truncated: Array, value: Array, gamma: float, n: int
) -> Array:
    """h(Σ_{k<m} γᵏ r_{t+k} + γᵐ (1 - terminated) h⁻¹(V(s_{t+m}))), V being rescaled values.

    Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX, eq. 1. Arguments as for
    `n_step_return`; returns [T, B].
    """
    value = value_unrescale(value)  # [T + 1, B]
    return value_rescale(n_step_return(reward, terminated, truncated, value, gamma, n))


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
