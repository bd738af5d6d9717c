"""Replay against hand-written golden cases and against a plain list of every row ever added."""

from functools import cache, partial
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy import stats

from common.errors import UserError
from common.replay import Replay, ReplayState, Transition, _free_bytes, interrupt

GAMMA = 0.9
# Each buffer of another shape is compiled anew, which takes longer than its few rows do. A method
# keeps its program as long as it is one object's.
compiled = cache(jax.jit)
compiled_sample = partial(compiled, static_argnums=2)
compiled_merge = partial(compiled, static_argnums=1)
one_replay = cache(Replay)


def fill(replay: Replay, rows: list[Transition]) -> ReplayState:
    state = compiled(replay.init)(rows[0].obs, rows[0].action, rows[0].extras)
    add = compiled(replay.add)
    for row in rows:
        state = add(state, row)
    return state


def counter_row(i: int, ended: bool = False, stack: list[int] | None = None) -> Transition:
    """Row i of one environment; obs, action and reward are all i."""
    obs = [[i]] if stack is None else [[[frame] for frame in stack]]
    return Transition(
        obs=np.array(obs, np.int32),
        action=np.full(1, i, np.int32),
        reward=np.full(1, i, np.float32),
        terminated=np.full(1, ended),
        truncated=np.zeros(1, bool),
        valid=np.ones(1, bool),
    )


def test_golden_overwrite():
    replay = Replay(capacity=10, num_envs=1, gamma=GAMMA)
    state = fill(replay, [counter_row(i) for i in range(15)])
    assert state.storage.obs.ravel().tolist() == [10, 11, 12, 13, 14, 5, 6, 7, 8, 9]
    assert int(state.size) == 10


def test_golden_merge_in_time_order():
    small = Replay(capacity=10, num_envs=1, gamma=GAMMA)
    large = Replay(capacity=20, num_envs=1, gamma=GAMMA)
    source = fill(small, [counter_row(i) for i in range(15)])
    merged = compiled_merge(large.merge)(
        fill(large, [counter_row(i) for i in range(3)]), small, source
    )
    rows = large.in_time_order(merged)
    assert rows.obs.ravel().tolist() == [0, 1, 2, *range(5, 15)]
    assert int(merged.size) == 13


def test_merge_does_not_join_the_seam():
    large = Replay(capacity=20, num_envs=1, gamma=GAMMA, n_step=3)
    source = fill(large, [counter_row(i) for i in range(5, 9)])
    merged = compiled_merge(large.merge)(
        fill(large, [counter_row(i) for i in range(3)]), large, source
    )
    batch = compiled(large.gather)(merged, jnp.array([1, 2, 3]), jnp.zeros(3, int))
    assert batch.weight.tolist() == [1, 0, 1]  # row 2 has lost its next observation
    assert batch.next_obs[:, 0].tolist()[::2] == [2, 8]  # row 1 bootstraps at 2, not at 5 or 6
    np.testing.assert_allclose(batch.reward[0], 1.0)
    np.testing.assert_allclose(batch.discount[0], GAMMA)
    later = compiled(large.add)(merged, counter_row(100))
    batch = compiled(large.gather)(later, jnp.array([5, 6]), jnp.zeros(2, int))
    assert batch.weight.tolist() == [1, 0]  # nor does row 8 go on with 100
    assert batch.obs[:, 0].tolist() == [7, 8] and batch.next_obs[0, 0] == 8


def test_merge_keeps_frame_stacks_apart():
    replay = Replay(capacity=20, num_envs=1, gamma=GAMMA, frame_stack=3)
    first = fill(replay, [counter_row(i, stack=[0, max(0, i - 1), i]) for i in range(3)])
    # A buffer that has overwritten the start of its episode: its oldest stack is cut short.
    small = Replay(capacity=4, num_envs=1, gamma=GAMMA, frame_stack=3)
    second = fill(small, [counter_row(i, stack=[i - 2, i - 1, i]) for i in range(10, 16)])
    merged = compiled_merge(replay.merge)(first, small, second)
    batch = compiled(replay.gather)(merged, jnp.array([3, 4, 5]), jnp.zeros(3, int))
    assert batch.obs[..., 0].tolist() == [[12, 12, 12], [12, 12, 13], [12, 13, 14]]
    assert batch.weight.tolist() == [0, 0, 1]  # no agent saw the first two


def golden_stack_rows() -> list[Transition]:
    """16 adds whose episodes end at i % 5 == 0, each with the stack of 4 that an agent sees."""
    rows, stack = [], [0] * 4
    for i in range(16):
        starts = i == 0 or (i - 1) % 5 == 0
        stack = [i] * 4 if starts else [*stack[1:], i]
        rows.append(counter_row(i, ended=i % 5 == 0, stack=stack))
    return rows


def test_golden_frame_stacks():
    replay = Replay(capacity=9, num_envs=1, gamma=GAMMA, frame_stack=4)
    state = fill(replay, golden_stack_rows())
    batch = compiled(replay.gather)(state, jnp.arange(9), jnp.zeros(9, int))
    assert batch.obs[..., 0].tolist() == [
        [7, 7, 8, 9],
        [7, 8, 9, 10],
        [11, 11, 11, 11],
        [11, 11, 11, 12],
        [11, 11, 12, 13],
        [11, 12, 13, 14],
        [12, 13, 14, 15],
        [7, 7, 7, 7],
        [7, 7, 7, 8],
    ]
    unfinished = [0, 2, 3, 4, 5, 7, 8]
    assert batch.next_obs[..., 0][jnp.array(unfinished)].tolist() == [
        [7, 8, 9, 10],
        [11, 11, 11, 12],
        [11, 11, 12, 13],
        [11, 12, 13, 14],
        [12, 13, 14, 15],
        [7, 7, 7, 8],
        [7, 7, 8, 9],
    ]


def test_frame_stack_stores_one_frame():
    replay = Replay(capacity=10, num_envs=2, gamma=GAMMA, frame_stack=4)
    obs = jax.ShapeDtypeStruct((2, 4, 84, 84), jnp.uint8)
    state = jax.eval_shape(replay.init, obs, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert state.storage.obs.shape == (5, 2, 84, 84)


class Lane(NamedTuple):
    """Every row that one environment ever produced."""

    stacks: list[list[int]]
    reward: list[float]
    terminated: list[bool]
    truncated: list[bool]
    valid: list[bool]


def play(rng: np.random.Generator, length: int, stack: int) -> Lane:
    """Random episodes under the boundary contract, with lost lives that keep the frames."""
    lane = Lane([], [], [], [], [])
    ended, new_game = False, True
    frames = [0] * stack
    for _ in range(length):
        frame = int(rng.integers(0, 3))  # few values, so that frames repeat by chance
        if new_game:
            frames = [frame] * stack
        elif lane.stacks:
            frames = [*frames[1:], frame]
        valid = not ended
        terminated = valid and rng.random() < 0.2
        truncated = valid and not terminated and rng.random() < 0.2
        lane.stacks.append(list(frames))
        lane.reward.append(float(rng.integers(-5, 6)) if valid else 0.0)
        lane.terminated.append(bool(terminated))
        lane.truncated.append(bool(truncated))
        lane.valid.append(valid)
        # The invalid row shows the final observation; the row after it starts the next episode.
        new_game = ended and rng.random() < 0.7
        ended = bool(terminated or truncated)
    return lane


def expected_return(lane: Lane, i: int, n_step: int) -> tuple[float, float, int]:
    """Sum of discounted rewards, discount of the bootstrap value, and its row."""
    total, k = 0.0, 0
    while k < n_step and lane.valid[i + k]:
        total += GAMMA**k * lane.reward[i + k]
        k += 1
        if lane.terminated[i + k - 1]:
            return total, 0.0, i + k
        if lane.truncated[i + k - 1]:
            break
    return total, GAMMA**k, i + k


def transitions(lanes: list[Lane], stack: int) -> list[Transition]:
    rows = []
    for i in range(len(lanes[0].reward)):
        stacks = np.array([lane.stacks[i] for lane in lanes], np.uint8)  # [N, stack]
        column: dict[str, Any] = {
            name: np.array([getattr(lane, name)[i] for lane in lanes]) for name in Lane._fields[1:]
        }
        obs = stacks[..., None] if stack > 1 else {"frame": stacks[:, -1:]}
        action = np.full((len(lanes), 2), i, np.int32)
        column["reward"] = np.float32(column["reward"])
        rows.append(
            Transition(obs=obs, action=action, **column, extras=np.full(len(lanes), i, np.int32))
        )
    return rows


# Few shapes, each compiled once, and many episodes: num_envs, num_rows, n_step, frame_stack.
SHAPES = [
    (1, 9, 1, 1),
    (2, 12, 1, 3),
    (3, 14, 2, 2),
    (1, 10, 2, 4),
    (2, 11, 3, 1),
    (1, 13, 3, 3),
    (3, 9, 4, 4),
    (2, 14, 4, 1),
]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), length=st.integers(8, 40), shape=st.sampled_from(SHAPES))
def test_samples_equal_the_plain_list(seed, length, shape):
    num_envs, num_rows, n_step, frame_stack = shape
    rng = np.random.default_rng(seed)
    lanes = [play(rng, length, frame_stack) for _ in range(num_envs)]
    replay = one_replay(num_rows * num_envs, num_envs, GAMMA, n_step, frame_stack)
    state = fill(replay, transitions(lanes, frame_stack))
    sample = compiled_sample(replay.sample)
    batch = jax.device_get(sample(state, jax.random.key(seed), 64))
    oldest = max(0, length - num_rows)
    first_complete = oldest + (frame_stack - 1 if length >= num_rows else 0)
    drawn_valid = 0
    for b in range(64):
        i = int(batch.extras[b])
        assert first_complete <= i < length - n_step
        candidates = [lane for lane in lanes if matches(batch, b, lane, i, n_step, frame_stack)]
        assert candidates, f"sample {b}, row {i} is in no lane"
        drawn_valid += float(batch.weight[b]) > 0
    if drawn_valid:
        np.testing.assert_allclose(batch.weight.sum(), 64, rtol=1e-5)
        np.testing.assert_allclose(batch.weight.max(), 64 / drawn_valid, rtol=1e-5)


def matches(batch: Any, b: int, lane: Lane, i: int, n_step: int, frame_stack: int) -> bool:
    obs, next_obs = (
        x[b, :, 0] if frame_stack > 1 else x["frame"][b] for x in (batch.obs, batch.next_obs)
    )
    now = lane.stacks[i] if frame_stack > 1 else lane.stacks[i][-1:]
    if (float(batch.weight[b]) > 0) != lane.valid[i] or obs.tolist() != now:
        return False
    if not lane.valid[i]:
        return True
    reward, discount, j = expected_return(lane, i, n_step)
    then = lane.stacks[j] if frame_stack > 1 else lane.stacks[j][-1:]
    return (
        np.isclose(batch.reward[b], reward, atol=1e-5)
        and np.isclose(batch.discount[b], discount)
        and next_obs.tolist() == then
        and batch.action[b].tolist() == [i, i]
    )


@pytest.mark.parametrize(("n_step", "length"), [(1, 5), (3, 5), (1, 20), (3, 20)])
def test_every_complete_row_is_drawn_equally_often(n_step, length):
    replay = Replay(capacity=20, num_envs=2, gamma=GAMMA, n_step=n_step)
    rows = transitions([play(np.random.default_rng(0), length, 1) for _ in range(2)], 1)
    state = fill(replay, rows)
    drawn = np.asarray(compiled_sample(replay.sample)(state, jax.random.key(0), 40_000).extras)
    oldest = max(0, length - 10)
    counts = np.bincount(drawn, minlength=length)
    allowed = np.arange(oldest, length - n_step)
    assert counts[:oldest].sum() == counts[length - n_step :].sum() == 0
    np.testing.assert_allclose(counts[allowed] / 40_000, 1 / len(allowed), rtol=0.1)


def test_three_step_return_by_hand():
    replay = Replay(capacity=10, num_envs=1, gamma=0.5, n_step=3)
    # r = 1, 2, 4 (terminated), reset row, then 8, 16 (truncated), reset row, 32, 64, 128
    rewards = [1, 2, 4, 0, 8, 16, 0, 32, 64, 128]
    rows = [counter_row(i)._replace(reward=jnp.full(1, float(r))) for i, r in enumerate(rewards)]
    rows[2] = rows[2]._replace(terminated=jnp.ones(1, bool))
    rows[5] = rows[5]._replace(truncated=jnp.ones(1, bool))
    for i in (3, 6):
        rows[i] = rows[i]._replace(valid=jnp.zeros(1, bool))
    batch = compiled(replay.gather)(fill(replay, rows), jnp.arange(7), jnp.zeros(7, int))
    real = jnp.array([0, 1, 2, 4, 5])
    assert batch.weight.tolist() == [1, 1, 1, 0, 1, 1, 0]
    assert batch.reward[real].tolist() == [1 + 1 + 1, 2 + 2, 4, 8 + 8, 16]
    assert batch.discount[real].tolist() == [0, 0, 0, 0.25, 0.5]
    assert batch.next_obs[real, 0].tolist() == [3, 3, 3, 6, 6]


def test_a_return_stops_where_no_row_parts_two_episodes():
    replay = Replay(capacity=10, num_envs=1, gamma=0.5, n_step=3)
    rows = [counter_row(i, ended=i == 1) for i in range(5)]
    batch = compiled(replay.gather)(fill(replay, rows), jnp.arange(2), jnp.zeros(2, int))
    assert batch.reward.tolist() == [0 + 0.5, 1]
    assert batch.discount.tolist() == [0, 0]


def test_too_little_data_has_no_weight():
    replay = Replay(capacity=10, num_envs=1, gamma=GAMMA, n_step=3)
    state = fill(replay, [counter_row(0)])
    batch = compiled_sample(replay.sample)(state, jax.random.key(0), 4)
    assert batch.weight.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"capacity": 3, "n_step": 2, "frame_stack": 2}, "--buffer-size 3"),
        ({"capacity": 10, "n_step": 0}, "at least 1"),
        ({"capacity": 10, "frame_stack": 0}, "at least 1"),
        ({"capacity": 10, "priority_exponent": 6.5}, "--priority-exponent 6.5 .* use 6 or less"),
        ({"capacity": 99, "sequence_length": 4, "sequence_period": 5}, "at least every 4"),
        ({"capacity": 8, "sequence_length": 4, "sequence_period": 3}, "sequences of 4.*least 9"),
        ({"capacity": 53, "block_length": 54}, "--buffer-size 53.*blocks of 54 rows.*least 54"),
        ({"capacity": 7, "block_length": 2, "n_step": 6}, "--n-step 6.*blocks of 2 rows.*least 8"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(UserError, match=said):
        Replay(num_envs=1, gamma=GAMMA, **options)


def test_frame_stack_must_fit_the_observation():
    replay = Replay(capacity=10, num_envs=1, gamma=GAMMA, frame_stack=4)
    with pytest.raises(UserError, match="--frame-stack 4"):
        replay.init(jnp.zeros((1, 3, 5, 5)), jnp.zeros(1, jnp.int32))


def test_frame_stack_must_begin_with_one_frame():
    """Else no row says where an episode begins, and stacks would reach into the one before it."""
    envs = gym.vector.SyncVectorEnv([lambda: padded("reset"), lambda: padded("zero")])
    obs, _ = envs.reset(seed=1)
    options = {"capacity": 10, "gamma": GAMMA, "frame_stack": 4}
    with pytest.raises(UserError, match="padding_type='reset'; use that, or --frame-stack 1"):
        Replay(num_envs=2, **options).init(jnp.asarray(obs), jnp.zeros(2, jnp.int32))
    Replay(num_envs=1, **options).init(jnp.asarray(obs[:1]), jnp.zeros(1, jnp.int32))


def padded(padding_type: str) -> gym.Env:
    env = gym.make("CartPole-v1")
    return gym.wrappers.FrameStackObservation(env, 4, padding_type=padding_type)


def test_merge_needs_equal_lanes():
    one, two = (Replay(capacity=10, num_envs=n, gamma=GAMMA) for n in (1, 2))
    state = fill(one, [counter_row(0)])
    with pytest.raises(UserError, match="cannot merge"):
        one.merge(state, two, state)
    apart = Replay(capacity=10, num_envs=1, gamma=GAMMA, sequence_length=2, sequence_period=2)
    for first, second in ((one, apart), (apart, one)):
        with pytest.raises(UserError, match="whose sequences start every 2 steps"):
            first.merge(state, second, state)


def test_checkpoint_round_trip(tmp_path):
    from common.run.checkpoint import Checkpoints

    replay = Replay(capacity=9, num_envs=1, gamma=GAMMA, frame_stack=4)
    state = fill(replay, golden_stack_rows())
    Checkpoints(tmp_path).save(5, state, None)
    like = replay.init(golden_stack_rows()[0].obs, jnp.zeros(1, jnp.int32))
    restored = Checkpoints(tmp_path).restore(5, like)
    assert isinstance(restored, ReplayState)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_checkpoint_of_arrays_without_elements(tmp_path):
    from common.run.checkpoint import Checkpoints

    state = {"empty": jnp.zeros((3, 0)), "full": jnp.arange(3), "key": jax.random.key(1)}
    Checkpoints(tmp_path, keep=1).save(5, state, None)
    restored = Checkpoints(tmp_path).restore(5, state)
    assert restored["empty"].shape == (3, 0)
    assert restored["full"].tolist() == [0, 1, 2]
    assert restored["key"] == state["key"]


def test_interrupt_drops_the_newest_row():
    replay = Replay(capacity=10, num_envs=1, gamma=GAMMA)
    broken = counter_row(1)._replace(reward=jnp.full(1, jnp.nan))
    state = interrupt(fill(replay, [counter_row(0), broken]))
    state = compiled(replay.add)(state, counter_row(2))
    batch = compiled(replay.gather)(state, jnp.arange(2), jnp.zeros(2, int))
    assert batch.weight.tolist() == [1, 0]
    assert jnp.isfinite(batch.reward).all()


def test_a_buffer_larger_than_the_free_memory_is_refused(monkeypatch):
    # A row of 2 environments: 2 numbers, an action, a reward and 3 flags each, 38 bytes.
    obs, action = jnp.zeros((2, 2)), jnp.zeros(2, jnp.int32)
    monkeypatch.setattr("common.replay._free_bytes", lambda: 38 * 1000)
    Replay(2000, 2, 0.99).init(obs, action)
    with pytest.raises(UserError) as raised:
        Replay(2002, 2, 0.99).init(obs, action)
    line = (
        "--buffer-size 2002 needs 0.0 GB of memory, 0.0 GB are free; use --buffer-size 2000 or less"
    )
    assert str(raised.value) == line


def test_the_free_memory_is_known():
    assert 1e8 < _free_bytes() < 1e13


# --- priorities -----------------------------------------------------------------------------------

ALPHA = 0.7


def leaves_of(replay: Replay, state: ReplayState) -> np.ndarray:
    """p^α of all rows [T, N]."""
    size = replay.num_rows * replay.num_envs
    return np.asarray(state.priorities.tree[0])[:size].reshape(replay.num_rows, -1)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), length=st.integers(8, 40), shape=st.sampled_from(SHAPES[1:7]))
def test_priorities_equal_a_dictionary(seed, length, shape):
    """Over random episodes, wrap-arounds and updates in between: which rows, and which numbers."""
    num_envs, num_rows, n_step, frame_stack = shape
    rng = np.random.default_rng(seed)
    lanes = [play(rng, length, frame_stack) for _ in range(num_envs)]
    replay = one_replay(num_rows * num_envs, num_envs, GAMMA, n_step, frame_stack, ALPHA)
    rows = transitions(lanes, frame_stack)
    state = compiled(replay.init)(rows[0].obs, rows[0].action, rows[0].extras)
    add, update = compiled(replay.add), compiled(replay.update_priorities)
    sample = compiled_sample(replay.sample)
    known: dict[tuple[int, int], float] = {}  # (row, lane) -> p^α
    largest = 1.0
    for i, row in enumerate(rows):
        state = add(state, row)
        first = max(0, i + frame_stack - num_rows)  # older ones are lost, or miss a frame
        known = {place: p for place, p in known.items() if place[0] >= first}
        for n, lane in enumerate(lanes):
            if i - n_step >= first and lane.valid[i - n_step]:
                known[i - n_step, n] = largest
        expected = np.zeros((num_rows, num_envs))
        for (time, n), priority in known.items():
            expected[time % num_rows, n] = priority
        np.testing.assert_allclose(leaves_of(replay, state), expected, rtol=1e-6)
        if i % 3 == 0:
            batch = sample(state, jax.random.key(i), 8)
            index = np.asarray(batch.index)
            td_error = np.float32((index - 5) * (i + 1) / 7)  # equal where a row comes twice
            state = update(state, batch.index, jnp.array(td_error))
            for time, leaf, error in zip(np.asarray(batch.extras), index, td_error, strict=True):
                if known:
                    assert leaf // num_envs == time % num_rows
                    known[int(time), leaf % num_envs] = (abs(float(error)) + 1e-6) ** ALPHA
            largest = max([largest, *known.values()])


def prioritized(priorities: list[float], alpha: float = 1.0) -> tuple[Replay, ReplayState]:
    """A buffer of one lane whose complete rows have these |δ|."""
    replay = one_replay(len(priorities) + 1, 1, GAMMA, priority_exponent=alpha)
    state = fill(replay, [counter_row(i) for i in range(len(priorities) + 1)])
    rows = jnp.arange(len(priorities))
    return replay, compiled(replay.update_priorities)(state, rows, jnp.array(priorities))


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_rows_are_drawn_in_proportion_to_their_priority(alpha):
    priorities = [4.0, 1.0, 0.25, -9.0, 2.0]
    replay, state = prioritized(priorities, alpha)
    draw = compiled(jax.vmap(lambda key: replay.sample(state, key, 1).obs))
    batches = draw(jax.random.split(jax.random.key(0), 40_000))
    expected = np.abs(priorities) ** alpha
    counts = np.bincount(batches.ravel(), minlength=6)
    assert counts[5] == 0  # the newest row misses its next observation
    pvalue = stats.chisquare(counts[:5], expected / expected.sum() * 40_000).pvalue
    assert pvalue > 1e-3


def test_each_equal_share_gives_one_row():
    # Shares of 10 / 5 = 2: the first two fall on row 0, the third on 0 or 1, the others on 2 and 3.
    replay, state = prioritized([4.5, 1.5, 2.0, 2.0])
    for seed in range(20):
        drawn = compiled_sample(replay.sample)(state, jax.random.key(seed), 5).index.tolist()
        assert drawn in ([0, 0, 0, 2, 3], [0, 0, 1, 2, 3])


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_importance_weights(beta):
    """(1 / (M P))^β over the largest: by hand for priorities 1, 2 and 4."""
    replay, state = prioritized([1.0, 2.0, 4.0])
    batch = compiled_sample(replay.sample)(state, jax.random.key(0), 7, beta)
    assert set(batch.index.tolist()) == {0, 1, 2}
    expected = np.array([1.0, 0.5, 0.25])[batch.index] ** beta
    np.testing.assert_allclose(batch.weight, expected, rtol=1e-5)


def test_no_row_has_weight_before_one_is_complete():
    replay = Replay(10, 1, GAMMA, n_step=3, priority_exponent=0.6)
    state = fill(replay, [counter_row(i) for i in range(3)])
    batch = compiled_sample(replay.sample)(state, jax.random.key(0), 4, 0.0)
    assert batch.weight.tolist() == [0, 0, 0, 0]
    state = compiled(replay.update_priorities)(state, batch.index, jnp.full(4, 9.0))
    assert not leaves_of(replay, state).any() and state.priorities.largest == 1
    state = compiled(replay.add)(state, counter_row(3))
    batch = compiled_sample(replay.sample)(state, jax.random.key(0), 4)
    assert batch.obs[:, 0].tolist() == [0] * 4


def test_merged_rows_get_the_largest_priority():
    _, state = prioritized([3.0, 1.0, 2.0])
    small = Replay(4, 1, GAMMA, priority_exponent=1.0)
    large = Replay(8, 1, GAMMA, priority_exponent=1.0)
    merged = compiled_merge(large.merge)(
        large.init(jnp.zeros((1, 1), int), jnp.zeros(1, int)), small, state
    )
    assert leaves_of(large, merged).ravel().tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    both = compiled_merge(large.merge)(prioritized_in(large), small, state)
    # Row 3 of the first buffer has lost what followed it; the newest row is not complete.
    np.testing.assert_allclose(leaves_of(large, both).ravel(), [5, 5, 5, 0, 5, 5, 5, 0], rtol=1e-5)


def prioritized_in(replay: Replay) -> ReplayState:
    state = fill(replay, [counter_row(i) for i in range(4)])
    return compiled(replay.update_priorities)(state, jnp.arange(3), jnp.full(3, 5.0))


def test_checkpoint_of_priorities(tmp_path):
    from common.run.checkpoint import Checkpoints

    replay, state = prioritized([3.0, 1.0, 2.0], 0.6)
    Checkpoints(tmp_path).save(5, state, None)
    like = replay.init(jnp.zeros((1, 1), int), jnp.zeros(1, int))
    restored = Checkpoints(tmp_path).restore(5, like)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_a_checkpoint_of_a_release_without_priorities(tmp_path):
    """A field that holds nothing may be new; one that holds something may not."""
    from common.run.checkpoint import Checkpoints

    class Earlier(NamedTuple):
        storage: Any
        stack_start: Any
        position: Any
        size: Any

    class State(NamedTuple):
        replay: Any
        step: Any

    state = fill(Replay(4, 1, GAMMA), [counter_row(7)])
    Checkpoints(tmp_path).save(5, State(Earlier(*state[:4]), jnp.int32(5)), None)
    restored = Checkpoints(tmp_path).restore(5, State(state, jnp.int32(0)))
    jax.tree.map(np.testing.assert_array_equal, restored, State(state, jnp.int32(5)))
    prioritized = Replay(4, 1, GAMMA, priority_exponent=0.5)
    like = prioritized.init(jnp.zeros((1, 1), int), jnp.zeros(1, int))
    with pytest.raises(ValueError, match="priorities"):
        Checkpoints(tmp_path).restore(5, State(like, jnp.int32(0)))


# --- sequences ------------------------------------------------------------------------------------


def drawable(replay: Replay, lanes: list[Lane], length: int) -> set[tuple[int, int]]:
    """(row, lane) of the starts of all sequences that are complete after `length` rows."""
    first = max(0, length - replay.num_rows + replay.frame_stack - 1)
    if length < replay.num_rows and not replay.priority_exponent:
        first = 0  # no frame is lost yet; a tree drops the row that will lose the first one
    rows = range(first, length - replay.num_sequence_rows + 1)
    starts = [i for i in rows if i % replay.sequence_period == 0]
    return {(i, n) for i in starts for n in range(len(lanes))}


def is_sequence(replay: Replay, sequences: Any, b: int, lane: Lane, i: int) -> bool:
    """Return whether sequence b is rows i, i + 1, ... of the lane."""
    rows = slice(i, i + replay.num_sequence_rows)
    flags = ("reward", "terminated", "truncated", "valid")
    found = sequences.rows
    obs = found.obs[b, ..., 0] if replay.frame_stack > 1 else found.obs["frame"][b]
    stacks = [stack[-replay.frame_stack :] for stack in lane.stacks[rows]]
    return (
        all(getattr(found, name)[b].tolist() == getattr(lane, name)[rows] for name in flags)
        and found.action[b, :, 0].tolist() == list(range(rows.start, rows.stop))
        and obs.tolist() == stacks
    )


# num_envs, sequence_length, overlap, n_step, frame_stack, alpha
SEQUENCE_SHAPES = [
    (1, 2, 0, 1, 2, ALPHA),
    (2, 3, 1, 3, 1, ALPHA),
    (3, 4, 3, 2, 3, ALPHA),
    (1, 5, 2, 3, 3, 0.0),
    (2, 2, 3, 2, 1, 0.0),
    (3, 5, 0, 1, 2, 0.0),
]


@settings(max_examples=18, deadline=None, derandomize=True, phases=[Phase.generate])
@given(seed=st.integers(0, 10_000), shape=st.sampled_from(SEQUENCE_SHAPES))
def test_sequences_equal_the_plain_list(seed, shape):
    """Frame stacks, n-step returns and priorities of sequences, over episodes and wrap-arounds."""
    num_envs, sequence_length, overlap, n_step, frame_stack, alpha = shape
    rng = np.random.default_rng(seed)
    period = max(1, sequence_length - overlap)
    num_rows = -(-(sequence_length + n_step + frame_stack + 5) // period) * period
    length = 2 * num_rows + 3
    lanes = [play(rng, length, frame_stack) for _ in range(num_envs)]
    options = GAMMA, n_step, frame_stack, alpha, sequence_length, period
    replay = one_replay(num_rows * num_envs, num_envs, *options)
    rows = transitions(lanes, frame_stack)
    state = compiled(replay.init)(rows[0].obs, rows[0].action, rows[0].extras)
    add, update = compiled(replay.add), compiled(replay.update_priorities)
    sample = compiled_sample(replay.sample_sequences)
    known: dict[tuple[int, int], float] = {}  # (row, lane) -> p^α
    largest = 1.0
    for i, row in enumerate(rows):
        state = add(state, row)
        places = drawable(replay, lanes, i + 1)
        known = {place: known.get(place, largest) for place in places}
        if alpha:
            expected = np.zeros((num_rows // period, num_envs))
            for (time, n), priority in known.items():
                expected[time % num_rows // period, n] = priority
            leaves = np.asarray(state.priorities.tree[0])[: expected.size]
            np.testing.assert_allclose(leaves.reshape(expected.shape), expected, rtol=1e-6)
        if i % 3:
            continue
        sequences = sample(state, jax.random.key(i), 8)
        if not places:
            assert not sequences.weight.any()
            continue
        for b in range(8):
            start = int(sequences.extras[b])
            matches_lane = partial(is_sequence, replay, sequences, b, i=start)
            of_lane = [n for n, lane in enumerate(lanes) if matches_lane(lane=lane)]
            assert of_lane and (start, of_lane[0]) in places
            if alpha:
                leaf = int(sequences.index[b])
                assert leaf // num_envs == start % num_rows // period
                assert leaf % num_envs in of_lane
        if alpha:
            td_error = np.float32((np.asarray(sequences.index) - 2) * (i + 1) / 7)
            state = update(state, sequences.index, jnp.array(td_error))
            for start, leaf, error in zip(
                np.asarray(sequences.extras), np.asarray(sequences.index), td_error, strict=True
            ):
                known[int(start), int(leaf) % num_envs] = (abs(float(error)) + 1e-6) ** ALPHA
            largest = max([largest, *known.values()])


def test_every_complete_sequence_is_drawn_equally_often():
    replay = Replay(20, 2, GAMMA, n_step=2, sequence_length=3, sequence_period=2)
    rows = transitions([play(np.random.default_rng(0), 15, 1) for _ in range(2)], 1)
    sequences = compiled_sample(replay.sample_sequences)(
        fill(replay, rows), jax.random.key(0), 8_000
    )
    counts = np.bincount(sequences.extras, minlength=15)
    # Rows 5 to 14 are there; a sequence ends 4 rows after its start.
    assert set(np.flatnonzero(counts)) == {6, 8, 10}
    np.testing.assert_allclose(counts[[6, 8, 10]] / 8_000, 1 / 3, rtol=0.1)
    assert sequences.weight.tolist() == [1.0] * 8_000


def test_only_the_starts_of_sequences_keep_their_extras():
    replay = Replay(24, 2, GAMMA, sequence_length=4, sequence_period=4)
    state = fill(replay, transitions([play(np.random.default_rng(0), 10, 1)] * 2, 1))
    assert state.storage.extras.tolist() == [[0, 0], [4, 4], [8, 8]]
    with pytest.raises(UserError, match="cannot merge buffers whose sequences start every 4 steps"):
        replay.merge(state, replay, state)


# --- blocks ---------------------------------------------------------------------------------------


def stacked(rows: list[Transition]) -> Transition:
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def cut_lane(lane: Lane, start: int, steps: int) -> Lane:
    """Rows of one trajectory and the one behind it, as they count in a buffer."""
    cut = Lane(*(field[start : start + steps + 1] for field in lane))
    cut.truncated[-2] = not cut.terminated[-2]
    cut.valid[-1] = False
    return cut


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    seed=st.integers(0, 10_000),
    num_envs=st.integers(1, 3),
    num_steps=st.integers(1, 6),
    num_blocks=st.integers(2, 4),
    n_step=st.integers(1, 4),
    frame_stack=st.integers(1, 4),
    alpha=st.sampled_from([0.0, ALPHA, ALPHA]),
)
def test_blocks_equal_their_trajectories(
    seed, num_envs, num_steps, num_blocks, n_step, frame_stack, alpha
):
    """Of two explorers in random order, over episodes and wrap-arounds: every row, drawn or not."""
    rng = np.random.default_rng(seed)
    blocks_each, length = 6, num_steps + frame_stack
    explorers = [[play(rng, 40, frame_stack) for _ in range(num_envs)] for _ in range(2)]
    all_rows = [transitions(lanes, frame_stack) for lanes in explorers]
    num_blocks = max(num_blocks, -(-(n_step + frame_stack) // length))
    capacity = (num_blocks * length + int(rng.integers(length))) * num_envs
    replay = Replay(capacity, num_envs, GAMMA, n_step, frame_stack, alpha, block_length=length)
    assert replay.num_rows == num_blocks * length
    first = all_rows[0][0]
    state = compiled(replay.init)(first.obs, first.action, first.extras)
    add, gather = compiled(replay.add_block), compiled(replay.gather)
    update, sample = compiled(replay.update_priorities), compiled_sample(replay.sample)
    times, envs = np.divmod(np.arange(replay.num_rows * num_envs), num_envs)
    stored: dict[tuple[int, int], tuple[Lane, int, int]] = {}  # place -> lane, row in it, first row
    leaves = np.zeros((replay.num_rows, num_envs))  # p^α
    for i, e in enumerate(rng.permutation([0, 1] * blocks_each)):
        start = num_steps * (i // 2)
        block = stacked(all_rows[e][start : start + num_steps + 1])
        td_error = np.float32(rng.normal(size=(num_steps, num_envs)))
        state = add(state, block, td_error)
        place = i % num_blocks * length + frame_stack - 1
        for n, lane in enumerate(cut_lane(lane, start, num_steps) for lane in explorers[e]):
            stored |= {(place + t, n): (lane, t, start) for t in range(num_steps)}
            priority = (np.abs(td_error[:, n]) + 1e-6) ** alpha * lane.valid[:-1]
            leaves[place : place + num_steps, n] = priority
        batch = jax.device_get(gather(state, times, envs))
        for b, at in enumerate(zip(times, envs, strict=True)):
            is_right = at in stored and matches_block(batch, b, *stored[at], n_step, frame_stack)
            assert is_right if at in stored else batch.weight[b] == 0
        drawn = jax.device_get(sample(state, jax.random.key(i), 8))
        if alpha:
            np.testing.assert_allclose(leaves_of(replay, state), leaves, rtol=1e-5)
            is_valid = leaves.ravel()[drawn.index] > 0
            assert is_valid.all() or not leaves.any()
            new = np.float32(drawn.index + i)
            state = update(state, drawn.index, new)
            leaves[np.divmod(drawn.index, num_envs)] = (new + 1e-6) ** alpha * is_valid
        elif drawn.weight.any():
            np.testing.assert_allclose(drawn.weight.sum(), 8, rtol=1e-5)


def matches_block(batch: Any, b: int, lane: Lane, t: int, start: int, *options: int) -> bool:
    """Return whether row b of a batch is row t of a trajectory that began at row `start`."""
    is_action = batch.action[b].tolist() == [start + t] * 2
    moved = batch._replace(action=batch.action - start)
    return is_action and int(batch.extras[b]) == start + t and matches(moved, b, lane, t, *options)


def test_golden_blocks():
    """Three steps, stacks of 2: rows of an older frame, 3 steps and the observation behind them."""
    replay = Replay(11, 1, 0.5, 2, 2, 1.0, block_length=5)
    assert replay.num_rows == 10
    rows = [counter_row(i, stack=[i - 1, i]) for i in range(10)]
    state, add = compiled(replay.init)(rows[0].obs, rows[0].action), compiled(replay.add_block)
    state = add(state, stacked(rows[1:5]), jnp.array([[-3.0], [2.0], [1.0]]))
    assert state.storage.obs.ravel().tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 0, 0]
    assert state.storage.valid.ravel().tolist() == [*[0, 1, 1, 1, 0], *[0] * 5]
    assert state.storage.truncated.ravel().tolist() == [*[0, 0, 0, 1, 0], *[0] * 5]
    leaves = leaves_of(replay, state).ravel()
    np.testing.assert_allclose(leaves, [*[0, 3, 2, 1, 0], *[0] * 5], rtol=2e-6)
    assert state.priorities.largest == leaves[1] and int(state.size) == int(state.position) == 5
    batch = compiled(replay.gather)(state, jnp.array([1, 2, 3]), jnp.zeros(3, int))
    assert batch.obs[..., 0].tolist() == [[0, 1], [1, 2], [2, 3]]
    assert batch.reward.tolist() == [1 + 2 / 2, 2 + 3 / 2, 3]  # the last return has one step
    assert batch.discount.tolist() == [0.25, 0.25, 0.5]
    assert batch.next_obs[..., 0].tolist() == [[2, 3], [3, 4], [3, 4]]
    for start in (5, 6):
        state = add(state, stacked(rows[start : start + 4]), jnp.ones((3, 1)))
    assert state.storage.obs.ravel().tolist() == [5, 6, 7, 8, 9, 4, 5, 6, 7, 8]
    assert int(state.size) == 10 and int(state.position) == 5
    assert state.priorities.largest == leaves[1]  # of the block that is overwritten


def test_a_block_has_the_length_of_blocks():
    replay = Replay(10, 1, GAMMA, block_length=5)
    rows = [counter_row(i) for i in range(4)]
    state = replay.init(rows[0].obs, rows[0].action)
    with pytest.raises(AssertionError):
        replay.add_block(state, stacked(rows), jnp.ones((3, 1)))
    with pytest.raises(UserError, match="cannot merge buffers of blocks of 5 rows"):
        replay.merge(state, replay, state)
