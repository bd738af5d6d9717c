"""Explorers: processes that collect for a Learner, on this machine or others, as actors of Ray.

The Learner is the Trainer of this process. An Explorer builds the same file's Trainer with
environments of its own, is sent parameters, and returns trajectories through Ray's object store.
"""

import dataclasses
import heapq
import inspect
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax

from common.errors import UserError
from common.rollout import Trajectory

from common.run.cli import ExplorerOptions
from common.run.explorer import Collected, Explorer, Plan, packed, weights_of
from common.run.trainer import Learner

POLL_SECONDS = 0.2
PLACE_SECONDS = 10.0  # after which the user is told that Explorers wait for a core
START_SECONDS = 300.0  # to import JAX, make the environments and compile


class ExplorerFailure(UserError):
    """Explorers failed more often than they may."""

    exit_code = 1


class Explorers:
    """The Explorers of a Trainer; `run` stands in for its `compiled_run`.

    How they keep pace is the Trainer's to say, see `trainer.Learner`.
    """

    def __init__(
        self,
        trainer: Learner,
        options: ExplorerOptions,
        say: Callable[[str], None],
        received: Sequence[signal.Signals] = (),
        learn: Callable[..., Any] | None = None,
    ) -> None:
        """Ask Ray, which must have been initialised, for the Explorers.

        Args:
            trainer: the Learner; it goes on from where it stands.
            options: how many Explorers, where, and how patient to be with them.
            say: prints a line.
            received: signals; once there is one, `run` returns before the log point.
            learn: `learn_trajectory`, compiled for several devices, say.

        Raises:
            UserError: the environments cannot be shared out among them.
        """
        self.trainer, self.options = trainer, options
        count = options.explorers
        self._group_size = group_size(trainer.pace, trainer.config.num_envs, count)
        most, self._publish_frequency = options.in_flight or 2 * count, options.publish_frequency
        if trainer.pace == "synchronous":
            most, self._publish_frequency = count, 1
        most = -(-most // self._group_size) * self._group_size  # else a group might never fill
        plan = _plan(trainer, self._group_size, count)
        self._pool = _Pool(plan, self._all_slots(), most, options, say, received)
        self._version = 0  # of the parameters: how many times they have learned
        self._learn = learn or jax.jit(trainer.learn_trajectory, donate_argnums=(0, 1))
        self._pack = jax.jit(packed)
        self._metrics = jax.eval_shape(trainer.zero_metrics, trainer.state)

    def close(self) -> None:
        """End the Explorers."""
        self._pool.close()

    @property
    def places(self) -> list[tuple[str, int] | None]:
        """Host and process of each Explorer; None while Ray looks for a core."""
        return [member.place for member in self._pool.members]

    def run(self, state: Any, _num_iterations: int) -> tuple[Any, dict[str, Any]]:
        """Learn from trajectories up to the next log point.

        Raises:
            ExplorerFailure: an Explorer failed too often; `trainer.state` is what was learned.
        """
        config, start = self.trainer.config, time.perf_counter()
        step, metrics = int(state.step), optax.tree.zeros_like(self._metrics)
        end = min(config.total_timesteps, step + config.log_frequency)
        state = state._replace(env=self.trainer.env.reset_summary(state.env))
        tally = _Tally(jax.device_get(state.env.summary))
        try:
            while step < end and (group := self._next_group(state)):
                step += sum(collected.num_steps for collected in group)
                state = state._replace(step=np.int32(step))
                tally.add(group, self._version, self._pool.depth)
                if all(collected.trajectory is not None for collected in group):
                    trajectory = _side_by_side([collected.trajectory for collected in group])
                    state, metrics = self._learn(state, metrics, trajectory)
                    self._version += 1
        finally:
            state = state._replace(env=state.env._replace(summary=tally.summary))
            self.trainer.state = state
        seconds = time.perf_counter() - start
        return state, metrics | tally.logs() | self._pool.logs(seconds)

    def _next_group(self, state: Any) -> list[Collected]:
        """Publish the parameters if it is time to, and wait for what an update needs."""
        if self._pool.version < 0 or self._version - self._pool.version >= self._publish_frequency:
            self._pool.publish(self._pack(weights_of(state.learner)), self._version)
        return self._pool.next_group(self._group_size)

    def _all_slots(self) -> list["_Slots"]:
        """Return the slots of each Explorer: its own, or the same object for all."""
        config, count = self.trainer.config, self.options.explorers
        share = self._group_size
        size = config.num_envs // share * config.num_steps
        first, total = int(self.trainer.state.step) // share, config.total_timesteps // share
        if share > 1:
            return [_Slots(first, size, total) for _ in range(count)]
        return [_Slots(first, size, total)] * count


def group_size(pace: str, num_envs: int, count: int) -> int:
    """Return from how many Explorers' trajectories the Learner learns at once.

    Raises:
        UserError: the environments cannot be shared out among them.
    """
    if pace == "asynchronous":
        return 1
    if num_envs % count:
        raise UserError(
            f"--explorers {count} does not divide --num-envs {num_envs}, which are shared out "
            "among them; use a divisor"
        )
    return count


def _plan(trainer: Learner, share: int, count: int) -> Plan:
    """Return what each of `count` Explorers is built from; `share` of them share the run."""
    config, path = trainer.config, Path(inspect.getfile(type(trainer).collect_trajectory))
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    fields["num_envs"] //= share
    fields["total_timesteps"] //= share
    if replay := getattr(trainer, "replay", None):  # an Explorer makes one, and drops it
        fields["buffer_size"] = max(replay.least_capacity, fields["batch_size"])
    weights = jax.tree.leaves(jax.eval_shape(lambda: weights_of(trainer.state.learner)))
    first_step = int(trainer.state.step)
    return Plan(str(path), path.read_text(), sys.path, fields, count, first_step, weights)


def _side_by_side(trajectories: list[Trajectory]) -> Trajectory:
    """Put the environments of several trajectories beside each other."""
    if len(trajectories) == 1:
        return trajectories[0]

    def join(axis: int, parts: Sequence[Any]) -> Any:
        return jax.tree.map(lambda *x: np.concatenate(x, axis), *parts)

    rollouts, *others = zip(*trajectories, strict=True)
    return Trajectory(join(1, rollouts), *(join(0, parts) for parts in others))


class _Slots:
    """Which env steps of the run the next trajectories are; a slot is the first of them.

    The slot of a trajectory that was lost is given back, and taken again.
    """

    def __init__(self, first: int, size: int, total: int) -> None:
        self._next, self._size, self._total = first, size, total
        self._lost: list[int] = []

    def is_empty(self) -> bool:
        """Return whether all steps of the run are made or under way."""
        return not self._lost and self._next >= self._total

    def take(self) -> int:
        """Take the earliest."""
        if self._lost:
            return heapq.heappop(self._lost)
        self._next += self._size
        return self._next - self._size

    def give_back(self, slot: int) -> None:
        """Let it be taken again."""
        heapq.heappush(self._lost, slot)


class _Tally:
    """What is logged of the trajectories of one interval."""

    def __init__(self, summary: Any) -> None:
        self.summary = summary  # EpisodeSummary of numpy scalars
        self._count = self._lag = self._depth = self._bytes = 0

    def add(self, group: list[Collected], version: int, depth: int) -> None:
        """Count trajectories that are learned from now."""
        for collected in group:
            self.summary = jax.tree.map(np.add, self.summary, collected.summary)
            self._bytes += sum(x.nbytes for x in jax.tree.leaves(collected.trajectory))
            self._lag += version - collected.version
        self._count += len(group)
        self._depth += depth * len(group)

    def logs(self) -> dict[str, float]:
        """Return the means, and the sum of the bytes."""
        count = max(1, self._count)
        return {
            "explorers/policy_lag": self._lag / count,
            "explorers/queue_depth": self._depth / count,
            "explorers/megabytes": self._bytes / 1e6,
        }


@dataclasses.dataclass
class _Member:
    """What the Learner knows of one Explorer."""

    number: int
    slots: _Slots
    actor: Any = None
    place: tuple[str, int] | None = None  # host and process
    stage: Literal["placing", "starting", "collecting"] = "placing"
    pending: int = 0  # requests without an answer
    unlearned: int = 0  # answers that the Learner has not taken yet
    since: float = 0.0  # when it began with the first of the requests
    restarts: int = 0
    raised: int = 0
    lost: int = 0  # times since its last trajectory
    num_steps: int = 0  # since the last log point


@dataclasses.dataclass(frozen=True)
class _Request:
    member: _Member
    slot: int | None = None  # of a trajectory


class _Pool:
    """Requests to Explorers, their answers, and what is done about those that fail."""

    def __init__(
        self,
        plan: Plan,
        all_slots: list[_Slots],
        most: int,
        options: ExplorerOptions,
        say: Callable[[str], None],
        received: Sequence[signal.Signals],
    ) -> None:
        self.plan, self.options, self.say, self.received = plan, options, say, received
        self.version = -1  # of the parameters that were published last
        self._weights: Any = None
        count = len(all_slots)
        self._most, self._most_each = most, -(-most // count)  # requested and not yet learned
        self._requests: dict[Any, _Request] = {}  # by the reference of the answer
        self._answers: list[tuple[_Member, Collected]] = []
        self._said: set[str] = set()
        import ray

        self._ray = ray
        self._actor_class = self._ray.remote(num_cpus=1)(Explorer)
        self.members = [_Member(number, slots) for number, slots in enumerate(all_slots)]
        for member in self.members:
            self._place(member)

    @property
    def depth(self) -> int:
        """Trajectories that have arrived and wait for the Learner."""
        return len(self._answers)

    def publish(self, weights: dict[str, Any], version: int) -> None:
        """Give later requests these parameters."""
        self._weights, self.version = self._ray.put(jax.device_get(weights)), version

    def next_group(self, size: int) -> list[Collected]:
        """Wait for the next trajectories, each of another Explorer; [] after a signal.

        Raises:
            ExplorerFailure: an Explorer failed too often.
        """
        self._receive(timeout=0)
        while len(group := self._oldest(size)) < size:
            if self.received:
                return []
            self._receive(timeout=POLL_SECONDS)
        taken = set(map(id, group))
        self._answers = [answer for answer in self._answers if id(answer) not in taken]
        for member, collected in group:
            member.unlearned -= 1
            member.num_steps += collected.num_steps
        return [collected for _, collected in sorted(group, key=lambda answer: answer[0].number)]

    def _oldest(self, size: int) -> list[tuple[_Member, Collected]]:
        """Return the first answers of up to `size` Explorers."""
        first: dict[int, tuple[_Member, Collected]] = {}
        for answer in self._answers:
            if len(first) < size:
                first.setdefault(answer[0].number, answer)
        return list(first.values())

    def logs(self, seconds: float) -> dict[str, float]:
        """Return the env steps a second of each Explorer since the last call, and all restarts."""
        logs = {"explorers/restarts": float(sum(member.restarts for member in self.members))}
        for member in self.members:
            logs[f"explorers/SPS_{member.number}"] = member.num_steps / seconds
            member.num_steps = 0
        return logs

    def close(self) -> None:
        """End the Explorers."""
        for member in self.members:
            self._ray.kill(member.actor)
        self._requests.clear()

    def _receive(self, timeout: float) -> None:
        """Ask for what may be asked for, take what has arrived, replace who is silent."""
        self._request_more()
        if not self._requests:
            return
        ready, _ = self._ray.wait(list(self._requests), num_returns=1, timeout=timeout)
        if ready:
            waiting = list(self._requests)
            ready, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for reference in ready:
            if reference in self._requests:  # not one of an Explorer that was replaced just now
                self._answer(reference, self._requests.pop(reference))
        self._replace_silent()

    def _request_more(self) -> None:
        """Ask the Explorers with the least to do, in turn, within the bounds."""
        while True:
            total = sum(member.pending + member.unlearned for member in self.members)
            free = [member for member in self.members if self._may_request(member)]
            if not free or total >= self._most:
                return
            member = min(free, key=lambda member: (member.pending + member.unlearned, member.since))
            slot = member.slots.take()
            call = member.actor.collect.remote(self._weights, self.version, slot)
            self._send(member, call, slot)

    def _may_request(self, member: _Member) -> bool:
        is_free = member.pending + member.unlearned < self._most_each
        return member.stage == "collecting" and is_free and not member.slots.is_empty()

    def _send(self, member: _Member, reference: Any, slot: int | None = None) -> None:
        if not member.pending:
            member.since = time.monotonic()
        member.pending += 1
        self._requests[reference] = _Request(member, slot)

    def _place(self, member: _Member) -> None:
        """Ask Ray for an actor."""
        member.actor, member.stage, member.place = self._actor_class.remote(), "placing", None
        self._send(member, member.actor.is_placed.remote())

    def _answer(self, reference: Any, request: _Request) -> None:
        member, errors = request.member, self._ray.exceptions
        member.pending -= 1
        try:
            answer = self._ray.get(reference)
        except errors.RayTaskError as error:
            member.raised += 1
            self._replace(member, request.slot, "raised an error", error)
        except errors.RayError:
            member.lost += 1
            self._replace(member, request.slot, "was lost")
        else:
            member.since = time.monotonic()
            self._advance(member, request.slot, answer)

    def _advance(self, member: _Member, slot: int | None, answer: Any) -> None:
        """Go on to the next stage, or keep a trajectory."""
        if slot is not None:
            member.lost, member.unlearned = 0, member.unlearned + 1
            self._answers.append((member, answer))
        elif member.stage == "placing":
            member.stage, member.place = "starting", answer
            self._send(member, member.actor.start.remote(self.plan, member.number, member.restarts))
        else:
            member.stage = "collecting"

    def _replace_silent(self) -> None:
        """Replace Explorers that have not answered in time; tell of those that have no core."""
        limits = {"starting": START_SECONDS, "collecting": self.options.explorer_timeout}
        placing = []
        for member in self.members:
            silent = time.monotonic() - member.since if member.pending else 0.0
            if member.stage == "placing":
                placing += [member] * (silent > PLACE_SECONDS)
            elif silent > limits[member.stage]:
                member.lost += 1
                self._replace(member, None, f"did not answer for {limits[member.stage]:g} s")
        if placing:
            cores = self._ray.cluster_resources().get("CPU", 0)
            self._say_once(
                "placing",
                f"{len(placing)} of {len(self.members)} Explorers wait for a core; the cluster "
                f"has {cores:g}",
            )

    def _replace(
        self, member: _Member, slot: int | None, what: str, error: Exception | None = None
    ) -> None:
        """Put a new Explorer in the place of one that failed, and ask for its steps again.

        Raises:
            ExplorerFailure: that was once too often.
        """
        lost = {r: request for r, request in self._requests.items() if request.member is member}
        for reference in lost:
            del self._requests[reference]
        for lost_slot in (slot, *(request.slot for request in lost.values())):
            if lost_slot is not None:
                member.slots.give_back(lost_slot)
        member.pending = 0
        self._ray.kill(member.actor)
        if error:
            cause = str(error).rstrip().rpartition("\n")[-1]
            traceback = re.sub(r"\x1b\[\d+m", "", str(error))  # Ray's colours
            self._say_once(cause, f"explorer {member.number} {what}:\n{traceback}")
        most = self.options.max_explorer_restarts
        if member.raised + member.lost > most:
            raise ExplorerFailure(
                f"explorer {member.number} {what}, after {most} restarts; mend the cause, or "
                "raise --max-explorer-restarts"
            )
        member.restarts += 1
        self.say(f"explorer {member.number} {what}; it starts again")
        self._place(member)

    def _say_once(self, subject: str, text: str) -> None:
        if subject not in self._said:
            self._said.add(subject)
            self.say(text)
