"""What every algorithm file shares: order, size, sound presets, functions equal to the letter."""

import ast
import dataclasses
import difflib
import importlib
import inspect
import itertools
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest

from common.envs.env import TimeStep

from common.run.config import check_config

ROOT = Path(__file__).parent.parent
ALGORITHMS = sorted(p for p in (ROOT / "algos").glob("*.py") if p.stem != "__init__")
MODULES = [importlib.import_module(f"algos.{path.stem}") for path in ALGORITHMS]
CLASSES = ["Config", "Model", "LearnerState", "Algorithm", "Agent", "TrainState", "Trainer"]

TRAINER_PARTS = [
    "Trainer.evaluate",
    "Trainer.init_state",
    "Trainer.run_iterations",
    "Trainer._run_collect",
    "Trainer._run_sync",
]
DQN_PARTS = [
    "Config.__post_init__",
    "Algorithm.init",
    "Algorithm.sync_target",
    "Agent.epsilon_greedy",
    "Trainer.__call__",
    *TRAINER_PARTS,
    "Trainer._run_train",
]
ACTING = ["Agent.__init__", "Agent.predict", "Agent.sample"]
VARIANT_PARTS = ["Algorithm.__init__", "Algorithm.predict", *ACTING]

# (parent, variant): the functions that must be equal to the letter, as "Class.function".
SHARED: dict[tuple[str, str], list[str]] = {
    ("ppo", "a2c"): [
        "Model.__init__",
        "Model.action_and_value",
        "Algorithm.init",
        "Algorithm.predict",
        "Algorithm.targets",
        "Agent.__init__",
        "Agent.predict",
        "Agent.sample",
        "Agent.prepare",
        "Trainer.__call__",
        "Trainer.evaluate",
        "Trainer.init_state",
        "Trainer.run_iterations",
        "Trainer.zero_metrics",
        "Trainer._run_collect",
        "Trainer.collect_trajectory",
    ],
    ("ppo", "ppo_rnn"): [
        "Algorithm.init",
        "Algorithm.targets",
        "Algorithm.policy_loss",
        "Algorithm.value_loss",
        "Algorithm.learn",
        "Agent.__init__",
        "Agent.learn",
        "Trainer.__call__",
        "Trainer.evaluate",
        "Trainer._run_epoch",
        "Trainer._is_near",
        "Trainer.run_iterations",
    ],
    ("ppo_rnn", "impala"): [
        "Algorithm.predict",
        "Agent.predict",
        "Trainer.__call__",
        "Trainer.evaluate",
        "Trainer._run_collect",
        "Trainer._memory",
        "Trainer.run_iterations",
        "Trainer.collect_trajectory",
    ],
    ("a2c", "impala"): ["Config.__post_init__"],
    ("impala", "pqn"): ["Algorithm.init"],
    ("ppo", "ddpg"): ["Agent.__init__"],
    ("ddpg", "td3"): [
        "Config.__post_init__",
        "Model.action",
        "Algorithm.__init__",
        "Algorithm.init",
        "Algorithm.model",
        "Algorithm.predict",
        "Algorithm.learn_actor",
        "Algorithm.skip_actor",
        "Algorithm.sync_target",
        "Agent.__init__",
        "Agent.predict",
        "Agent.sample",
        "Trainer.__call__",
        "Trainer.evaluate",
        "Trainer.init_state",
        "Trainer.run_iterations",
        "Trainer._run_collect",
    ],
    ("ddpg", "sac"): [
        "Config.__post_init__",
        "Algorithm.model",
        "Agent.__init__",
        "Trainer.evaluate",
        "Trainer.init_state",
        "Trainer._run_collect",
    ],
    ("td3", "sac"): ["Model.value"],
    ("sac", "sac_discrete"): [
        "Config.__post_init__",
        "Algorithm.init",
        "Algorithm.model",
        "Algorithm.sync_target",
        "Trainer.__call__",
        "Trainer.evaluate",
        "Trainer.run_iterations",
    ],
    ("dqn", "sac_discrete"): ["Trainer.evaluate"],
    ("dqn", "double_dqn"): [
        *DQN_PARTS,
        *VARIANT_PARTS,
        "Model.__init__",
        "Model.value",
        "Algorithm.loss_fn",
        "Agent.learn",
    ],
    ("dqn", "dueling_dqn"): [
        *DQN_PARTS,
        *VARIANT_PARTS,
        "Algorithm.td_target",
        "Algorithm.loss_fn",
        "Algorithm.learn",
        "Agent.learn",
    ],
    ("dqn", "prioritized_dqn"): [
        *DQN_PARTS[:-1],
        *(part for part in VARIANT_PARTS if part != "Agent.__init__"),
        "Model.__init__",
        "Model.value",
        "Algorithm.td_target",
    ],
    ("dqn", "noisy_dqn"): [
        "Config.__post_init__",
        "Algorithm.init",
        "Algorithm.sync_target",
        *TRAINER_PARTS,
    ],
    ("dqn", "c51"): [*DQN_PARTS[1:], *ACTING, "Agent.learn"],
    ("dqn", "qr_dqn"): [*DQN_PARTS, *ACTING, "Agent.learn"],
    ("dqn", "iqn"): [*DQN_PARTS[:-1], "Agent.__init__"],
    ("iqn", "noisy_dqn"): ["Agent.learn", "Trainer._run_train"],
    ("noisy_dqn", "r2d2"): ["Trainer.__call__"],
    ("noisy_dqn", "sac"): ["Trainer.__call__"],
    ("dqn", "rainbow"): [
        "Algorithm.init",
        "Algorithm.sync_target",
        "Agent.predict",
        "Agent.epsilon_greedy",
        *TRAINER_PARTS,
    ],
    ("prioritized_dqn", "rainbow"): ["Agent.__init__"],
    ("c51", "rainbow"): ["Config.__post_init__"],
    ("dqn", "r2d2"): [
        "Algorithm.init",
        "Algorithm.sync_target",
        "Agent.epsilon_greedy",
        "Trainer.evaluate",
        "Trainer._run_sync",
    ],
    ("prioritized_dqn", "apex_dqn"): [
        "Algorithm.init",
        "Algorithm.predict",
        "Algorithm.sync_target",
        "Agent.predict",
        "Agent.learn",
        "Agent.epsilon_greedy",
        "Trainer.evaluate",
        "Trainer._run_sync",
    ],
    ("double_dqn", "apex_dqn"): ["Algorithm.td_target"],
    ("dueling_dqn", "apex_dqn"): ["Model.__init__", "Model.value"],
    ("impala", "apex_dqn"): ["Trainer.__call__"],
    ("apex_dqn", "r2d2"): [
        "Agent.__init__",
        "Agent.spread_exploration",
        "Trainer.zero_metrics",
    ],
    ("dqn", "pqn"): [
        "Model.value",
        "Algorithm.predict",
        "Agent.__init__",
        "Agent.predict",
        "Agent.epsilon_greedy",
        "Trainer.evaluate",
    ],
    ("ppo", "pqn"): [
        "Config.__post_init__",
        "Trainer.evaluate",
        "Trainer.run_iterations",
        "Trainer.collect_trajectory",
    ],
}

# The most lines that a variant may have which its parent has not.
ADDED_LINES = {
    ("ddpg", "td3"): 45,
    ("dqn", "double_dqn"): 20,
    ("dqn", "dueling_dqn"): 20,
    ("dqn", "prioritized_dqn"): 35,
    ("dqn", "noisy_dqn"): 45,
    ("dqn", "c51"): 70,
    ("dqn", "qr_dqn"): 70,
    ("dqn", "iqn"): 70,
    ("c51", "rainbow"): 160,
    ("prioritized_dqn", "rainbow"): 160,
    ("prioritized_dqn", "apex_dqn"): 170,
}


def named_places(path: Path) -> list[list[str]]:
    """Return the methods and functions that each equation of a file's header names."""
    header = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
    equations = [line for line in header.splitlines() if line.startswith("    ")]
    places = [re.split(r"\s{2,}", line)[-1] for line in equations]
    for line, place in zip(equations, places, strict=True):
        assert re.fullmatch(r"[\w.]+(, [\w.]+)*", place), line
    return [place.split(", ") for place in places]


@cache
def classes(path: Path) -> dict[str, ast.ClassDef]:
    body = ast.parse(path.read_text()).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


@cache
def functions(path: Path) -> dict[str, str]:
    """Return the source of each method by "Class.function"."""
    text = path.read_text()
    found = {}
    for name, node in classes(path).items():
        for item in node.body:
            if isinstance(item, ast.FunctionDef):
                found[f"{name}.{item.name}"] = ast.get_source_segment(text, item) or ""
    return found


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
class TestEveryAlgorithm:
    def test_classes_in_order(self, path):
        assert list(classes(path)) == CLASSES

    def test_size(self, path):
        text = path.read_text()
        assert len(text[text.index("class Model(") :].splitlines()) <= 350
        assert max(map(len, text.splitlines())) <= 100
        for name, node in classes(path).items():
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    length = (item.end_lineno or 0) - item.lineno + 1
                    assert length <= 40, f"{name}.{item.name} has {length} lines"

    def test_every_option_is_explained(self, path):
        lines = path.read_text().splitlines()
        body = classes(path)["Config"].body
        fields = [node for node in body if isinstance(node, ast.AnnAssign)]
        assert len(fields) == len(body) - 2  # its docstring and its checks
        for field in fields:
            assert "  # " in lines[field.lineno - 1], lines[field.lineno - 1]

    def test_every_symbol_is_computed_where_the_header_says(self, path):
        for names in named_places(path):
            for name in names:
                module, _, function = name.rpartition(".")
                if module:
                    assert hasattr(importlib.import_module(f"common.{module}"), function), name
                    assert re.search(rf"\b{function}\(", path.read_text()), name
                else:
                    assert any(method.endswith(f".{name}") for method in functions(path)), name

    def test_imports_are_two_blocks_first_what_to_read(self, path):
        text = path.read_text()
        assert "from algos" not in text
        first, second = text.index("from common."), text.index("\n\nfrom common.run.")
        block = text[first:second].splitlines()
        assert not any(line.startswith("from common.run") for line in block) and "" not in block

    def test_nothing_is_packed_to_save_a_line(self, path):
        found = re.findall(
            r"\*\w+\[\d*:\d*\]|lambda \*\w+: \w+\[|\| dict\(|\w\[\d\]\.\w|\.values\(\)",
            path.read_text(),
        )
        assert not found

    def test_has_docs_tests_and_ends_with_run(self, path):
        assert (ROOT / "docs" / "algorithms" / f"{path.stem}.md").is_file()
        assert (ROOT / "tests" / f"test_{path.stem}.py").is_file()
        text = path.read_text()
        assert f"docs/algorithms/{path.stem}.md" in text
        _, _, end = text.partition('if __name__ == "__main__":\n')
        assert re.search(r"^    run\(Trainer, Config, PRESETS(, num_cores=\d)?\)\n\Z", end, re.M)

    def test_agent_and_trainer_keep_the_contract(self, path):
        names = set(functions(path))
        for name in ("predict", "sample", "learn"):
            assert f"Agent.{name}" in names
        for name in (
            "__call__",
            "evaluate",
            "init_state",
            "run_iterations",
            "_run_collect",
        ):
            assert f"Trainer.{name}" in names
        assert names & {"Trainer._run_train", "Trainer.learn_trajectory"}


@pytest.mark.parametrize(
    ("module", "preset"), [(module, preset) for module in MODULES for preset in module.PRESETS]
)
def test_presets_are_sound(module, preset):
    check_config(module.Config(**module.PRESETS[preset]))


@pytest.mark.parametrize(("pair", "names"), SHARED.items())
def test_shared_functions_are_equal_to_the_letter(pair, names):
    parent, variant = (functions(ROOT / "algos" / f"{name}.py") for name in pair)
    for name in names:
        assert parent[name] == variant[name], name


@pytest.mark.parametrize(
    "module", [m for m in MODULES if hasattr(m, "Replay")], ids=lambda module: module.__name__
)
def test_replay_has_the_options_of_the_config(module, monkeypatch):
    monkeypatch.setattr(module.Trainer, "init_state", lambda self, key: None)
    continuous = module.__name__ in ("algos.ddpg", "algos.td3", "algos.sac")
    options = {"num_envs": 2, "buffer_size": 4_000, "gamma": 0.9, "n_step": 3, "frame_stack": 2}
    options |= {"priority_exponent": 0.25}
    options = {k: v for k, v in options.items() if k in module.Config.__dataclass_fields__}
    env_id = "gymnax/Pendulum-v1" if continuous else "gymnax/CartPole-v1"
    replay = module.Trainer(module.Config(env_id=env_id, **options)).replay
    found = dataclasses.asdict(replay)
    found["buffer_size"] = replay.num_rows * replay.num_envs
    rounded = options | {"buffer_size": pytest.approx(4_000, rel=0.1)}  # to whole blocks
    assert {name: found[name] for name in options} == rounded


def bare_trainer(module: Any, keys: list) -> tuple[Any, Any]:
    """A Trainer whose parts do nothing but keep the keys that they are given, and its state."""

    def keep(*args: Any) -> Any:
        dtypes = [getattr(x, "dtype", int) for x in args]
        are_keys = [jnp.issubdtype(dtype, jax.dtypes.prng_key) for dtype in dtypes]
        keys.extend(itertools.compress(args, are_keys))
        return SimpleNamespace(index=())

    def part(function: Any, first: Any, last: Any) -> Any:
        num_results = len(get_args(inspect.signature(function).return_annotation))

        def kept(*args: Any) -> Any:
            keep(*args)
            return (first, *[()] * (num_results - 2), last) if num_results else first

        return kept

    trainer = object.__new__(module.Trainer)
    trainer.config = module.Config(num_envs=4)
    action = jnp.float32([[3], [4]])
    trainer.agent = SimpleNamespace(
        sample=part(module.Agent.sample, action, ()),
        learn=part(module.Agent.learn, (), {}),
        beta=lambda step: 0.5,
        env_action=lambda action: -action,
    )
    update = SimpleNamespace(update=lambda state, row: (state, ()))
    trainer.algorithm = SimpleNamespace(normalizer=update)
    trainer.replay = SimpleNamespace(
        add=lambda _, row: row,
        sample=keep,
        sample_sequences=keep,
        update_priorities=lambda *_: (),
    )
    learner = module.LearnerState(*[()] * len(module.LearnerState._fields))
    env = SimpleNamespace(obs=jnp.float32([[7], [8]]), ended=jnp.array([False, True]))
    known = dict(learner=learner, env=env, key=jax.random.key(0), step=jnp.int32(0))
    fields = dict.fromkeys(module.TrainState._fields, ()) | known
    if "noise" in fields:
        fields["noise"] = action
    return trainer, module.TrainState(**fields)


def assert_all_differ(keys: list) -> None:
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == len(keys)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_row_is_what_was_seen_done_and_given(module):
    """Of the observation that was acted on; and each step draws from a key of its own."""
    trainer, state = bare_trainer(module, keys := [])
    flags = jnp.array([True, False]), jnp.array([False, True])
    given = TimeStep(jnp.float32([[5], [6]]), jnp.float32([1, 2]), *flags)
    trainer.env = SimpleNamespace(step=lambda env, action: (env, given))
    seen = state.env.obs
    for _ in range(3):
        keys.append(state.key)
        result = trainer._run_collect(state)
        is_state = isinstance(result, module.TrainState)
        state, row = (result, result.replay) if is_state else result
        assert row.obs is seen and row.action.tolist() == [[3], [4]]
        for name in ("reward", "terminated", "truncated"):
            assert getattr(row, name) is getattr(given, name)
        assert row.valid.tolist() == [True, False]
    assert state.step == 12 and len(keys) >= 3
    assert_all_differ(keys)


@pytest.mark.parametrize(
    "module", [m for m in MODULES if hasattr(m, "Replay")], ids=lambda module: module.__name__
)
def test_every_update_draws_from_keys_of_its_own(module):
    """For the rows of its batch and for what else it draws; several may follow on one step."""
    trainer, state = bare_trainer(module, keys := [])
    takes_count = "update" in inspect.signature(trainer._run_train).parameters
    for update in range(3):
        keys.append(state.key)
        state, _ = trainer._run_train(state, *[update] * takes_count)
    assert len(keys) >= 6
    assert_all_differ(keys)


def test_all_functions_that_are_equal_are_held_equal():
    """Else a change in one of the files might go unnoticed, where its own tests do not see it."""
    of_file = {path.stem: functions(path) for path in ALGORITHMS}
    for name in sorted({name for found in of_file.values() for name in found}):
        held = {algo: {algo} for algo, found in of_file.items() if name in found}
        for (first, second), names in SHARED.items():
            if name in names:
                together = held[first] | held[second]
                held |= dict.fromkeys(together, together)
        for first, second in itertools.combinations(held, 2):
            equal = of_file[first][name] == of_file[second][name]
            assert not equal or second in held[first], (name, first, second)


@pytest.mark.parametrize(("pair", "most"), ADDED_LINES.items())
def test_a_variant_is_its_parent_with_few_other_lines(pair, most):
    paths = (ROOT / "algos" / f"{name}.py" for name in pair)
    parent, variant = (path.read_text().splitlines() for path in paths)
    added = [line for line in difflib.ndiff(parent, variant) if line.startswith("+ ")]
    assert 0 < len(added) <= most


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, also inside its functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


PROGRAMS = (f"common/{name}.py" for name in ("evaluate", "export", "plot"))
ENTRY_POINTS = "common/__init__.py", *PROGRAMS


@pytest.mark.parametrize("path", sorted((ROOT / "common").rglob("*.py")), ids=str)
def test_imports_point_one_way(path):
    """algos -> common.run -> common; the entry points alone look up."""
    place = path.relative_to(ROOT).as_posix()
    assert not any(name.split(".")[0] == "algos" for name in imported(path))
    if not place.startswith("common/run/") and place not in ENTRY_POINTS:
        assert not any(name.startswith("common.run") for name in imported(path))


def test_common_knows_trainers_by_their_contract_alone():
    for path in (ROOT / "common").rglob("*.py"):
        assert "trainer: Any" not in path.read_text(), path
        place = path.relative_to(ROOT).as_posix()
        if not place.startswith("common/run/") and place not in ENTRY_POINTS:
            assert "trainer" not in path.read_text().lower(), path


def test_a_difference_is_found(tmp_path):
    parent, variant = tmp_path / "a.py", tmp_path / "b.py"
    parent.write_text("class Agent:\n    def learn(self):\n        return 1\n")
    variant.write_text("class Agent:\n    def learn(self):\n        return 2\n")
    assert functions(parent)["Agent.learn"] != functions(variant)["Agent.learn"]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
@pytest.mark.slow
def test_a_new_metric_is_one_line(module, monkeypatch):
    learn, calls = module.Algorithm.learn, []

    def learn_and_measure(*args):
        calls.append(args)
        *result, metrics = learn(*args)
        return *result, metrics | {"extra": jnp.ones(())}

    monkeypatch.setattr(module.Algorithm, "learn", learn_and_measure)
    continuous = module.Config().env_id == "HalfCheetah-v4"
    env_id = "gymnax/Pendulum-v1" if continuous else "gymnax/CartPole-v1"
    trainer = module.Trainer(module.Config(env_id=env_id))
    _, metrics = jax.eval_shape(trainer.run_iterations, trainer.state, 1)
    assert calls and metrics["extra"].shape == () and "charts/updates" in metrics
