"""The commands of docs/zoo.md and docs/wrapping.md, as they stand there but for their length.

They run where the extra `zoo` is installed; .ci/run has an environment for it.
"""

import re
import shlex
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from run_helpers import run_alone

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs" / name for name in ("zoo.md", "wrapping.md")]
TEXT = "\n".join(page.read_text() for page in PAGES)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Command(NamedTuple):
    """A command of a page, and what its section installs first."""

    program: str
    flags: list[str]
    packages: set[str]

    def value(self, flag: str, default: str) -> str:
        return self.flags[self.flags.index(flag) + 1] if flag in self.flags else default


def commands(text: str) -> list[Command]:
    """Return every run of an algorithm that stands in a block of shell commands."""
    found = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        packages: set[str] = set()
        for language, block in BLOCK.findall(section):
            for line in block.replace("\\\n", "").splitlines() if language == "bash" else ():
                first, *words = shlex.split(line)
                if first == "pip":
                    packages |= set(words[1:])
                elif "my_module" not in words:
                    assert first == "python"
                    found.append(Command(words[0], words[1:], set(packages)))
    return found


def modules(text: str) -> dict[str, str]:
    """Return the blocks of Python that begin with the name of their file."""
    blocks = [block for language, block in BLOCK.findall(text) if language == "python"]
    return {block.partition("\n")[0].removeprefix("# "): block for block in blocks}


def is_installed(package: str) -> bool:
    names = {".[jax-envs]": "gymnax"}
    try:
        return bool(metadata.distribution(names.get(package, package)))
    except metadata.PackageNotFoundError:
        return False


COMMANDS = commands(TEXT)


def test_the_pages_have_commands_and_modules() -> None:
    assert len(COMMANDS) >= 11
    named = {command.value("--env-module", "") for command in COMMANDS}
    assert named - {"", "highway_env"} <= {name.removesuffix(".py") for name in modules(TEXT)}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.value("--env-id", ""))
def test_command_of_the_pages(tmp_path: Path, command: Command) -> None:
    pytest.importorskip("minigrid", reason="pip install -e '.[zoo]'")
    missing = {package for package in command.packages if not is_installed(package)}
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    for name, block in modules(TEXT).items():
        (tmp_path / name).write_text(block)
    num_envs = int(command.value("--num-envs", "8"))
    num_steps = int(command.value("--num-steps", "64"))
    steps = str(num_envs * num_steps)
    short = ["--total-timesteps", steps, "--eval-frequency", "0", "--eval-episodes", "1"]
    on_policy = command.program.endswith("ppo.py")
    short += ["--num-steps", str(num_steps)] if on_policy else ["--learning-starts", "256"]
    flags = without(command.flags, "--total-timesteps", "--eval-episodes", "--num-steps")
    program = (str(ROOT / command.program),)
    ran = run_alone(
        *flags,
        *short,
        "--runs-dir",
        tmp_path / "runs",
        program=program,
        timeout=900,  # It has the time that other tests leave.
        PYTHONPATH=str(tmp_path),
    )
    assert ran.code == 0, ran.err
    assert f"{int(steps):,} steps" in ran.out


def without(flags: list[str], *names: str) -> list[str]:
    """Return flags but for some, with their values."""
    dropped = {
        i for name in names if name in flags for i in (flags.index(name), flags.index(name) + 1)
    }
    return [word for i, word in enumerate(flags) if i not in dropped]
