"""Replay buffer: pure functions over device arrays, one observation stored a step.

Rows are stored as [T, N, ...]: T steps of N environments, each lane in time order. The next
observation of a row is the observation of the row after it, at the end of an episode too (see
`common.envs.env` for the boundary contract), so it is never stored twice.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from common import sum_tree
from common.errors import UserError
from common.ranges import SMALLEST
from common.sharding import shard_rows
from common.sum_tree import SumTree

PRIORITY_OF_NOTHING = 1e-6


class Transition(NamedTuple):
    """One step of N environments, as stored."""

    obs: Any  # [N, *obs] the observation that was acted on
    action: Any  # [N, *action]
    reward: Array  # [N] float32
    terminated: Array  # [N] bool
    truncated: Array  # [N] bool
    valid: Array  # [N] bool, False on the row whose action the environment ignored
    extras: Any = ()  # [N, ...] whatever else the agent wants back: log_prob, recurrent state, ...


class Batch(NamedTuple):
    """Sampled transitions with n-step returns."""

    obs: Any  # [B, *obs]
    action: Any  # [B, *action]
    reward: Array  # [B] sum over k < m of gamma^k r_{t+k}; m <= n_step ends with the episode
    discount: Array  # [B] gamma^m (1 - terminated): multiplies the value of next_obs
    next_obs: Any  # [B, *obs] observation m steps later, the true final one at an episode's end
    weight: Array  # [B] importance weight x validity; without priorities of mean 1
    extras: Any  # [B, ...]
    index: Any = ()  # [B] what `update_priorities` calls the rows, where they have priorities


class Sequences(NamedTuple):
    """Sampled sequences."""

    rows: Transition  # [B, S, ...] sequence_length rows and the n_step rows after them
    extras: Any  # [B, ...] of the first row
    weight: Array  # [B] importance weight; 1 without priorities
    index: Any = ()  # [B] what `update_priorities` calls the sequences, where they have priorities


class Priorities(NamedTuple):
    """How likely each row, or each sequence, is drawn."""

    tree: SumTree  # p^α of what starts at row (p k, n) at leaf k N + n; 0: must not be drawn
    largest: Array  # [] the largest p^α so far: that of new ones


class ReplayState(NamedTuple):
    """The buffer's arrays."""

    storage: Transition  # [T, N, ...]; extras [T / sequence_period, N, ...]
    stack_start: Array  # [T, N] bool, no older frame belongs to the stack of this row
    position: Array  # [] int32, the row written next
    size: Array  # [] int32, rows written so far, at most T
    priorities: Any = ()  # Priorities, where there are any


@dataclass(frozen=True)
class Replay:
    """Static options of a buffer, and the pure functions that work on its `ReplayState`.

    Attributes:
        capacity: transitions in all environments together; rounded down to a multiple of num_envs.
        num_envs: lanes N.
        gamma: discount of one step.
        n_step: steps in a return (Sutton 1988; Hessel et al. 2018). A return stops at the
            episode's end and bootstraps from the final observation unless it was terminal.
        frame_stack: if above 1, observations are [N, frame_stack, *frame] and only the newest
            frame is stored; stacks are rebuilt at sampling and never reach into another game.
        priority_exponent: α; above 0, rows are drawn in proportion to p^α with p = |δ| + 1e-6, the
            proportional variant of Schaul et al. 2016. New rows get the largest p so far.
        sequence_length: rows of a sequence that `sample_sequences` draws (Kapturowski et al. 2019);
            priorities are those of sequences.
        sequence_period: steps from the start of a sequence to that of the next. Only the first row
            of a sequence keeps its extras, such as a recurrent state.
        block_length: above 1, rows are written by `add_block`, as many at once: those of a
            trajectory, 1 behind it and frame_stack - 1 before it.

    Raises:
        UserError: if the capacity does not hold one sequence of returns of stacked observations,
            or the smallest priority is 0 in float32.
    """

    capacity: int
    num_envs: int
    gamma: float
    n_step: int = 1
    frame_stack: int = 1
    priority_exponent: float = 0.0
    sequence_length: int = 1
    sequence_period: int = 1
    block_length: int = 1

    def __post_init__(self) -> None:
        if self.n_step < 1 or self.frame_stack < 1:
            raise UserError(
                "--n-step and --frame-stack must be at least 1, got "
                f"{self.n_step}, {self.frame_stack}"
            )
        if PRIORITY_OF_NOTHING**self.priority_exponent < SMALLEST:
            raise UserError(
                f"--priority-exponent {self.priority_exponent} gives rows without an error the "
                "priority 0 in float32, with which they are never drawn; use 6 or less"
            )
        if not 1 <= self.sequence_period <= self.sequence_length:
            raise UserError(
                f"sequences of {self.sequence_length} steps that start every "
                f"{self.sequence_period} steps leave some out; start them at least every "
                f"{self.sequence_length}"
            )
        if self.num_rows * self.num_envs < self.least_capacity:
            length = self.sequence_length
            sequences = f" and sequences of {length}" if length > 1 else ""
            blocks = f" and blocks of {self.block_length} rows" if self.block_length > 1 else ""
            raise UserError(
                f"--buffer-size {self.capacity} is too small for --n-step {self.n_step} and "
                f"--frame-stack {self.frame_stack}{sequences}{blocks} with --num-envs "
                f"{self.num_envs}; use at least {self.least_capacity}"
            )

    @property
    def least_capacity(self) -> int:
        """The smallest capacity that holds a sequence of returns of stacked observations."""
        rows = self.num_sequence_rows + self.frame_stack - 2 + self.sequence_period
        return -(-rows // self._rows_at_once) * self._rows_at_once * self.num_envs

    @property
    def num_rows(self) -> int:
        """T, the rows of each lane, a multiple of sequence_period and of block_length."""
        return self.capacity // self.num_envs // self._rows_at_once * self._rows_at_once

    @property
    def _rows_at_once(self) -> int:
        return math.lcm(self.sequence_period, self.block_length)

    @property
    def num_sequence_rows(self) -> int:
        """S, the rows that a sequence and its last return look at; 1 + n_step for one row."""
        return self.sequence_length + self.n_step

    def init(self, obs: Any, action: Any, extras: Any = ()) -> ReplayState:
        """Return an empty buffer for rows like the first ones [N, ...], or of their shapes.

        Raises:
            UserError: frame_stack is not the number of frames that observations stack, the first
                stacks hold other frames than their newest, or the buffer is larger than the memory
                that is free.
        """
        if self.frame_stack > 1:
            self._check_stack(obs)
        frame = jax.eval_shape(self._newest_frame, obs)
        flags: dict[str, Any] = {"reward": jax.ShapeDtypeStruct((self.num_envs,), jnp.float32)}
        for name in ("terminated", "truncated", "valid"):
            flags[name] = jax.ShapeDtypeStruct((self.num_envs,), bool)
        stored: Any = Transition(obs=frame, action=action, **flags, extras=extras)
        num_starts = self.num_rows // self.sequence_period
        self._check_memory(stored, num_starts)
        storage = jax.tree.map(partial(_zeros, self.num_rows), stored._replace(extras=()))
        storage = storage._replace(extras=jax.tree.map(partial(_zeros, num_starts), extras))
        stack_start = jnp.zeros((self.num_rows, self.num_envs), bool)
        position, size = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        priorities: Any = ()
        if self.priority_exponent:
            tree = sum_tree.init(num_starts * self.num_envs)
            priorities = Priorities(tree, largest=jnp.ones(()))
        return ReplayState(storage, stack_start, position, size, priorities)

    def add(self, state: ReplayState, transition: Transition) -> ReplayState:
        """Write one step of all environments over the oldest row."""

        def write(buffer: Array, row: Array) -> Array:
            return lax.dynamic_update_index_in_dim(buffer, row, state.position, 0)

        extras = self._write_extras(state, transition.extras)
        stored = transition._replace(obs=self._newest_frame(transition.obs), extras=())
        storage = jax.tree.map(write, state.storage._replace(extras=()), stored)
        storage = storage._replace(extras=extras)
        stack_start = state.stack_start
        if self.frame_stack > 1:
            stack_start = write(stack_start, _is_repeated_frame(transition.obs))
        return ReplayState(
            storage=storage,
            stack_start=stack_start,
            position=(state.position + 1) % self.num_rows,
            size=jnp.minimum(state.size + 1, self.num_rows),
            priorities=self._move_priorities(state, storage.valid),
        )

    def add_block(self, state: ReplayState, block: Transition, td_error: Array) -> ReplayState:
        """Write a trajectory over the oldest one, with the priorities |δ| + 1e-6 of its rows.

        A block is complete in itself: its neighbours may come from other environments. Returns end
        with it, and bootstrap from the observation behind it; frames that were stacked before it
        began lie in front of it. So all of its valid rows can be drawn at once.

        Args:
            state: of a buffer whose block_length is L.
            block: [L - frame_stack + 1, N, ...] the rows, and one more that holds only the
                observation behind them.
            td_error: δ [L - frame_stack, N] of the rows.
        """
        older = self.frame_stack - 1
        num_steps = self.block_length - self.frame_stack
        chex.assert_shape([block.valid[:-1], td_error], (num_steps, self.num_envs))
        # Blocks always begin at the same rows: those of older frames stay invalid, with priority 0.
        first = state.position + older

        def write(buffer: Array, rows: Array, place: Array = first) -> Array:
            return lax.dynamic_update_slice_in_dim(buffer, rows, place, 0)

        stored = block._replace(
            obs=jax.vmap(self._newest_frame)(block.obs),
            truncated=block.truncated.at[-2].set(~block.terminated[-2]),
            valid=block.valid.at[-1].set(False),
        )
        storage = jax.tree.map(write, state.storage, stored)
        stack_start = state.stack_start
        if older:
            frames = block.obs[0, :, :-1].swapaxes(0, 1)  # [stack - 1, N, *frame]
            storage = storage._replace(obs=write(storage.obs, frames, state.position))
            stack_start = write(stack_start, jax.vmap(_is_repeated_frame)(block.obs))
        return ReplayState(
            storage=storage,
            stack_start=stack_start,
            position=(state.position + self.block_length) % self.num_rows,
            size=jnp.minimum(state.size + self.block_length, self.num_rows),
            priorities=self._write_priorities(state, first, td_error, block.valid[:-1]),
        )

    def _write_priorities(
        self, state: ReplayState, first: Array, td_error: Array, valid: Array
    ) -> Any:
        """Give rows [T, N] from `first` on the priorities of their δ, invalid ones 0."""
        if not self.priority_exponent:
            return ()
        tree, largest = state.priorities
        priority = jnp.where(valid, self._priority(td_error), 0.0)  # [T, N]
        tree = sum_tree.update_range(tree, first * self.num_envs, priority.ravel())
        return Priorities(tree, jnp.maximum(largest, priority.max()))

    def _write_extras(self, state: ReplayState, extras: Any) -> Any:
        """Keep the extras [N, ...] of a row that starts sequences."""
        place, steps = jnp.divmod(state.position, self.sequence_period)

        def write(buffer: Array, row: Array) -> Array:
            if self.sequence_period > 1:
                row = jnp.where(steps == 0, row, buffer[place])
            return lax.dynamic_update_index_in_dim(buffer, row, place, 0)

        return jax.tree.map(write, state.storage.extras, extras)

    def _move_priorities(self, state: ReplayState, valid: Array) -> Any:
        """Let what is complete now be drawn, and no more what loses a frame.

        Args:
            state: before a row is written at `position`.
            valid: [T, N] of all rows, with the one that is written.
        """
        if not self.priority_exponent:
            return ()
        tree, largest = state.priorities
        complete = (state.position - self.num_sequence_rows + 1) % self.num_rows
        lost = (state.position + self.frame_stack - 1) % self.num_rows
        starts, steps = jnp.divmod(jnp.stack([complete, lost]), self.sequence_period)  # [2]
        leaves = starts[:, None] * self.num_envs + jnp.arange(self.num_envs)  # [2, N]
        rows = (complete + np.arange(self.sequence_length)) % self.num_rows
        is_whole = state.size + 1 >= self.num_sequence_rows
        new = largest * valid[rows].any(axis=0) * is_whole  # [N]
        values = jnp.stack([new, jnp.zeros(self.num_envs)])  # [2, N]
        if self.sequence_period > 1:  # no sequence may start at these rows
            values = jnp.where(steps[:, None] == 0, values, tree[0][leaves])
        return Priorities(sum_tree.update(tree, leaves.ravel(), values.ravel()), largest)

    def sample(
        self, state: ReplayState, key: Array, batch_size: int, importance_exponent: Any = 1.0
    ) -> Batch:
        """Draw rows, with replacement, among those whose return is complete.

        The newest n_step rows still miss their next observation and, once the buffer is full, the
        oldest frame_stack - 1 rows miss frames: neither is drawn.

        Without priorities, rows are drawn uniformly; one whose action the environment ignored has
        weight 0, and the others share its weight. With priorities, such rows are not drawn; one row
        is drawn from each of `batch_size` equal shares of their sum, with the weight
        (1 / (M P(i)))^β over the largest of the batch, β being the importance exponent and M the
        number of rows.
        """
        time, env, weight, index = self._draw(state, key, batch_size, importance_exponent)
        batch = self.gather(state, time, env)
        weight = batch.weight * weight  # [B]
        if not self.priority_exponent:
            weight = weight * batch_size / jnp.maximum(weight.sum(), 1.0)
        return shard_rows(batch._replace(weight=weight, index=index))

    def sample_sequences(
        self, state: ReplayState, key: Array, batch_size: int, importance_exponent: Any = 1.0
    ) -> Sequences:
        """Draw sequences, with replacement, among those whose returns are complete.

        They start every `sequence_period` rows of a lane and may hold several episodes, with a row
        that is not valid between two. Which are drawn, and their weights, is as for `sample`.
        """
        time, env, weight, index = self._draw(state, key, batch_size, importance_exponent)
        sequences = self.gather_sequences(state, time, env)
        return shard_rows(sequences._replace(weight=weight, index=index))

    def _draw(
        self, state: ReplayState, key: Array, batch_size: int, importance_exponent: Any
    ) -> tuple[Array, Array, Array, Any]:
        """Return rows (time, env) [B] that start what is complete, their weights, and leaves."""
        if self.priority_exponent:
            index, weight = self._draw_by_priority(state, key, batch_size, importance_exponent)
            place, env = index // self.num_envs, index % self.num_envs
            return place * self.sequence_period, env, weight, index
        time, env, is_complete = self._draw_uniformly(state, key, batch_size)
        return time, env, jnp.full(batch_size, is_complete, jnp.float32), ()

    def _draw_uniformly(
        self, state: ReplayState, key: Array, batch_size: int
    ) -> tuple[Array, Array, Array]:
        """Return rows (time, env) [B] that start what is complete, and whether anything is."""
        period = self.sequence_period
        first = jnp.where(state.size == self.num_rows, self.frame_stack - 1, 0)
        first += -self._time_of(state, first) % period  # the first age at which one starts
        count = (state.size - self.num_sequence_rows - first) // period + 1
        # Not randint, which draws twice: the remainder of 32 bits is uniform to 1 in 4,000 at a
        # million rows.
        bits = jax.random.bits(key, (batch_size,), jnp.uint32)  # [B]
        num_places = jnp.maximum(count, 1) * self.num_envs
        index = (bits % num_places.astype(jnp.uint32)).astype(jnp.int32)
        age, env = first + index // self.num_envs * period, index % self.num_envs
        return self._time_of(state, age), env, count > 0

    def _draw_by_priority(
        self, state: ReplayState, key: Array, batch_size: int, importance_exponent: Any
    ) -> tuple[Array, Array]:
        """Return leaves of the tree [B] and their importance weights [B]."""
        tree = state.priorities.tree
        shares = jnp.arange(batch_size) + jax.random.uniform(key, (batch_size,))  # [B]
        index = sum_tree.draw(tree, shares / batch_size)  # [B]
        # M and the sum of all priorities are the same in every weight.
        priority = tree[0][index]  # [B]
        weight = jnp.where(priority > 0, priority**-importance_exponent, 0.0)  # [B]
        return index, weight / jnp.maximum(weight.max(), 1e-30)

    def update_priorities(self, state: ReplayState, index: Array, td_error: Array) -> ReplayState:
        """Give the rows index [B] of a batch the priority |δ| + 1e-6 of their δ [B]."""
        tree, largest = state.priorities
        priority = self._priority(td_error)  # [B]
        # A batch that was drawn while no row was complete names rows that must stay out.
        priority = jnp.where(tree[0][index] > 0, priority, 0.0)
        tree = sum_tree.update(tree, index, priority)
        priorities = Priorities(tree, jnp.maximum(largest, priority.max()))
        return state._replace(priorities=priorities)

    def _priority(self, td_error: Array) -> Array:
        """p^α = (|δ| + 1e-6)^α of δ, any shape."""
        return (jnp.abs(td_error) + PRIORITY_OF_NOTHING) ** self.priority_exponent

    def gather(self, state: ReplayState, time: Array, env: Array) -> Batch:
        """Return the transitions of rows (time, env) [B]; their weight is their validity."""
        storage = state.storage

        def take(x: Array, time: Array = time, env: Array = env) -> Array:
            return x.at[time, env].get(mode="promise_in_bounds")

        reward, discount, steps = self._n_step_return(state, time, env)
        return Batch(
            obs=self._obs_at(state, time, env),
            action=jax.tree.map(take, storage.action),
            reward=reward,
            discount=discount,
            next_obs=self._obs_at(state, (time + steps) % self.num_rows, env),
            weight=take(storage.valid).astype(jnp.float32),
            extras=jax.tree.map(take, storage.extras),
        )

    def gather_sequences(self, state: ReplayState, time: Array, env: Array) -> Sequences:
        """Return the sequences that start at rows (time, env) [B], each with weight 1."""
        storage = state.storage
        steps = np.arange(self.num_sequence_rows)
        times = (time[:, None] + steps) % self.num_rows  # [B, S]
        envs = jnp.broadcast_to(env[:, None], times.shape)  # [B, S]

        def take(x: Array) -> Array:
            return x.at[times, envs].get(mode="promise_in_bounds")  # [B, S, ...]

        def take_first(x: Array) -> Array:
            place = time // self.sequence_period, env
            return x.at[place].get(mode="promise_in_bounds")  # [B, ...]

        obs = self._obs_at(state, times.ravel(), envs.ravel())  # [B * S, ...]
        obs = jax.tree.map(lambda x: x.reshape(*times.shape, *x.shape[1:]), obs)  # [B, S, ...]
        rows = jax.tree.map(take, storage._replace(obs=(), extras=()))._replace(obs=obs)
        extras = jax.tree.map(take_first, storage.extras)
        return Sequences(rows, extras, weight=jnp.ones(time.shape))

    def _n_step_return(
        self, state: ReplayState, time: Array, env: Array
    ) -> tuple[Array, Array, Array]:
        """Return sum_k gamma^k r_{t+k}, gamma^m (1 - terminated) and m for rows [B]."""
        steps = np.arange(self.n_step)
        times = (time[:, None] + steps) % self.num_rows  # [B, n]

        def take(x: Array) -> Array:
            return x.at[times, env[:, None]].get(mode="promise_in_bounds")  # [B, n]

        s = state.storage
        ended = take(s.terminated) | take(s.truncated)  # [B, n]
        goes_on = jnp.pad(~ended[:, :-1], ((0, 0), (1, 0)), constant_values=True)  # [B, n]
        inside = jnp.cumprod(take(s.valid) & goes_on, axis=1)  # [B, n] 1 up to the episode's end
        discounts = jnp.where(inside, self.gamma, 1.0)  # [B, n]
        reward = (inside * self.gamma**steps * take(s.reward)).sum(1)  # [B]
        terminated = (inside * take(s.terminated)).any(1)  # [B]
        # An invalid row has weight 0; one step keeps its indices inside the buffer.
        num_steps = jnp.maximum(inside.sum(1), 1)  # [B]
        return reward, discounts.prod(1) * (1.0 - terminated), num_steps

    def _obs_at(self, state: ReplayState, time: Array, env: Array) -> Any:
        """Return the observations of rows [B], stacks rebuilt from single frames."""
        storage = state.storage.obs
        if self.frame_stack == 1:
            return jax.tree.map(lambda x: x.at[time, env].get(mode="promise_in_bounds"), storage)
        age = (time - state.position + state.size) % self.num_rows  # [B] 0 = oldest
        back = jnp.arange(self.frame_stack - 1)
        times = (time[:, None] - back) % self.num_rows  # [B, stack - 1] newest first
        starts = state.stack_start[times, env[:, None]] | (age[:, None] <= back)
        available = jnp.cumprod(~starts, axis=1).sum(1)  # [B] frames before this row
        oldest_first = jnp.arange(self.frame_stack - 1, -1, -1)
        offset = jnp.minimum(oldest_first, available[:, None])  # [B, stack]
        rows = (time[:, None] - offset) % self.num_rows
        return storage.at[rows, env[:, None]].get(mode="promise_in_bounds")

    def merge(self, state: ReplayState, other: "Replay", other_state: ReplayState) -> ReplayState:
        """Append the rows of another buffer of the same lanes and options, in time order.

        Neither buffer is joined to what is written behind it, and rows that miss older frames stay
        out of what is drawn.
        """
        self._check_mergeable(other)
        # No agent saw the stacks of the rows whose older frames were overwritten.
        cut = other._time_of(other_state, jnp.arange(self.frame_stack - 1))
        rows, is_whole = other_state.storage, other_state.size < other.num_rows
        rows = rows._replace(valid=rows.valid.at[cut].set(rows.valid[cut] & is_whole))

        def append(age: Array, merged: ReplayState) -> ReplayState:
            row = other._time_of(other_state, age)
            storage = jax.tree.map(
                lambda a, b: a.at[merged.position].set(b[row]), merged.storage, rows
            )
            starts = other_state.stack_start[row] | (age == 0)
            return ReplayState(
                storage=storage,
                stack_start=merged.stack_start.at[merged.position].set(starts),
                position=(merged.position + 1) % self.num_rows,
                size=jnp.minimum(merged.size + 1, self.num_rows),
                priorities=self._move_priorities(merged, storage.valid),
            )

        return interrupt(lax.fori_loop(0, other_state.size, append, interrupt(state)))

    def in_time_order(self, state: ReplayState) -> Transition:
        """Return the stored rows [size, N, ...] from oldest to newest (host only).

        The extras of a row are those of the last row that could start a sequence.
        """
        rows = self._time_of(state, jnp.arange(int(state.size)))
        storage = jax.tree.map(lambda x: x[rows], state.storage._replace(extras=()))
        starts = rows // self.sequence_period
        return storage._replace(extras=jax.tree.map(lambda x: x[starts], state.storage.extras))

    def _time_of(self, state: ReplayState, age: Array) -> Array:
        """Return the row index of an age; the oldest row has age 0."""
        return (state.position - state.size + age) % self.num_rows

    def _check_mergeable(self, other: "Replay") -> None:
        if (other.num_envs, other.frame_stack) != (self.num_envs, self.frame_stack):
            raise UserError(
                f"cannot merge a buffer of {other.num_envs} environments and frame_stack "
                f"{other.frame_stack} into one of {self.num_envs} and {self.frame_stack}; "
                "both must be equal"
            )
        block_length = max(self.block_length, other.block_length)
        if block_length > 1:
            raise UserError(
                f"cannot merge buffers of blocks of {block_length} rows: each is written whole; "
                "add the trajectories themselves"
            )
        period = max(self.sequence_period, other.sequence_period)
        if period > 1:
            raise UserError(
                f"cannot merge buffers whose sequences start every {period} steps: elsewhere they "
                "keep no recurrent state; use sequences that start every step"
            )

    def _check_stack(self, obs: Any) -> None:
        shape = getattr(obs, "shape", None)
        if shape is None or len(shape) < 3 or shape[1] != self.frame_stack:
            raise UserError(
                f"--frame-stack {self.frame_stack} needs observations that stack as many frames "
                f"along their first axis, got {shape and shape[1:]}; use --frame-stack 1"
            )
        is_known = isinstance(obs, np.ndarray | Array) and not isinstance(obs, jax.core.Tracer)
        if is_known and not _is_repeated_frame(obs).all():
            raise UserError(
                f"--frame-stack {self.frame_stack} needs environments whose episodes begin with "
                "the first frame in all places of the stack, such as Gymnasium's "
                "FrameStackObservation with padding_type='reset'; use that, or --frame-stack 1"
            )

    def _check_memory(self, row: Transition, num_starts: int) -> None:
        """Compare the bytes of the buffer with those that are free, before any is allocated."""
        row_bytes = _num_bytes(row._replace(extras=()))
        needed = row_bytes * self.num_rows + _num_bytes(row.extras) * num_starts
        free = _free_bytes()
        if free is not None and needed > free:
            fits = int(free // (needed / self.num_rows)) * self.num_envs
            raise UserError(
                f"--buffer-size {self.capacity} needs {needed / 1e9:.1f} GB of memory, "
                f"{free / 1e9:.1f} GB are free; use --buffer-size {fits} or less"
            )

    def _newest_frame(self, obs: Any) -> Any:
        return obs[:, -1] if self.frame_stack > 1 else obs


def _free_bytes() -> int | None:
    """Return the memory that is free where arrays are made, None where nobody tells."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    kilobytes = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((1024 * int(number) for number in kilobytes), None)


def interrupt(state: ReplayState, lanes: Any = True) -> ReplayState:
    """Mark that the rows written next do not continue the newest row of `lanes`, a mask [N] or all.

    Its reward goes too: it may be the NaN that stopped a run.
    """
    storage = state.storage
    newest = (state.position - 1) % len(storage.valid)
    valid = jnp.where(lanes, False, storage.valid[newest])  # [N]
    reward = jnp.where(lanes, 0.0, storage.reward[newest])  # [N]
    storage = storage._replace(
        valid=storage.valid.at[newest].set(valid), reward=storage.reward.at[newest].set(reward)
    )
    return state._replace(storage=storage)


def _num_bytes(rows: Any) -> int:
    leaves = jax.tree.leaves(rows)
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)


def _zeros(num_rows: int, row: Any) -> Array:
    return jnp.zeros((num_rows, *row.shape), row.dtype)


def _is_repeated_frame(stacked_obs: Array) -> Array:
    """Return whether all frames of [N, stack, *frame] are equal: nothing older is needed."""
    same = stacked_obs[:, :-1] == stacked_obs[:, -1:]
    return same.reshape(same.shape[0], -1).all(1)
