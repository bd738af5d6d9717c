"""What every algorithm file shares: order, size, sound presets, functions equal to the letter."""

import ast
import difflib
import importlib
from pathlib import Path

import pytest

from common.config import check_config

ROOT = Path(__file__).parent.parent
ALGORITHMS = sorted(p for p in (ROOT / "algos").glob("*.py") if p.stem != "__init__")
MODULES = [importlib.import_module(f"algos.{path.stem}") for path in ALGORITHMS]
CLASSES = ["Config", "Model", "LearnerState", "Algorithm", "Agent", "TrainState", "Trainer"]

# (parent, variant): the functions that must be equal to the letter, as "Class.function".
SHARED: dict[tuple[str, str], list[str]] = {
    ("ppo", "a2c"): [
        "Model.__init__",
        "Model.action_and_value",
        "Algorithm.init",
        "Algorithm.predict",
        "Algorithm.targets",
        "Algorithm.learn",
        "Agent.__init__",
        "Agent.predict",
        "Agent.sample",
        "Agent.prepare",
        "Agent.learn",
        "Trainer.__call__",
        "Trainer._run_evaluate",
        "Trainer._init_state",
        "Trainer._run_iterations",
        "Trainer._run_collect",
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
        "Trainer._run_evaluate",
    ],
    ("ddpg", "td3"): [
        "Model.action",
        "Algorithm.__init__",
        "Algorithm.init",
        "Algorithm.model",
        "Algorithm.predict",
        "Algorithm.sync_target",
        "Agent.__init__",
        "Agent.predict",
        "Agent.sample",
        "Trainer.__call__",
        "Trainer._run_evaluate",
        "Trainer._init_state",
        "Trainer._run_iterations",
        "Trainer._run_collect",
    ],
    ("td3", "sac"): [
        "Model.value",
        "Algorithm.model",
        "Agent.__init__",
        "Trainer.__call__",
        "Trainer._run_evaluate",
        "Trainer._init_state",
        "Trainer._run_iterations",
        "Trainer._run_collect",
    ],
    ("sac", "sac_discrete"): [
        "Algorithm.init",
        "Algorithm.model",
        "Algorithm.sync_target",
        "Trainer.__call__",
        "Trainer._run_evaluate",
        "Trainer._run_iterations",
    ],
}


def classes(path: Path) -> dict[str, ast.ClassDef]:
    body = ast.parse(path.read_text()).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


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
        lines = path.read_text().splitlines()
        assert len(lines) <= 300
        for name, node in classes(path).items():
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    length = (item.end_lineno or 0) - item.lineno + 1
                    assert length <= 40, f"{name}.{item.name} has {length} lines"

    def test_every_option_is_explained(self, path):
        lines = path.read_text().splitlines()
        for field in classes(path)["Config"].body[1:]:
            assert isinstance(field, ast.AnnAssign)
            assert "  # " in lines[field.lineno - 1], lines[field.lineno - 1]

    def test_imports_point_one_way(self, path):
        assert "from algos" not in path.read_text()

    def test_has_docs_tests_and_ends_with_run(self, path):
        assert (ROOT / "docs" / "algorithms" / f"{path.stem}.md").is_file()
        assert (ROOT / "tests" / f"test_{path.stem}.py").is_file()
        text = path.read_text()
        assert f"docs/algorithms/{path.stem}.md" in text
        assert text.endswith('if __name__ == "__main__":\n    run(Trainer, Config, PRESETS)\n')

    def test_agent_and_trainer_keep_the_contract(self, path):
        names = set(functions(path))
        for name in ("predict", "sample", "learn"):
            assert f"Agent.{name}" in names
        for name in ("__call__", "_run_collect", "_run_train", "_run_evaluate"):
            assert f"Trainer.{name}" in names


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


def test_td3_is_ddpg_with_few_other_lines():
    paths = (ROOT / "algos" / f"{name}.py" for name in ("ddpg", "td3"))
    ddpg, td3 = (path.read_text().splitlines() for path in paths)
    added = [line for line in difflib.ndiff(ddpg, td3) if line.startswith("+ ")]
    assert 0 < len(added) <= 70


def test_common_never_imports_algorithms():
    for path in (ROOT / "common").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(module.split(".")[0] == "algos" for module in modules), path


def test_a_difference_is_found(tmp_path):
    parent, variant = tmp_path / "a.py", tmp_path / "b.py"
    parent.write_text("class Agent:\n    def learn(self):\n        return 1\n")
    variant.write_text("class Agent:\n    def learn(self):\n        return 2\n")
    assert functions(parent)["Agent.learn"] != functions(variant)["Agent.learn"]
