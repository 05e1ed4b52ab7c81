"""An installed wheel works outside the checkout: its packages, its data and its command."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PACKAGES = ["offload_store", "scheduler", "workers", "cluster"]


@pytest.fixture(scope="module")
def wheel(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what git would hand out, so that nothing old slips in."""
    source = tmp_path_factory.mktemp("source")
    names = ["pyproject.toml", "README.md", "LICENSE", *PACKAGES]
    for name in names:
        _copy(repo_root / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(out), str(source)], check=True, timeout=300)
    (built,) = out.glob("haversack-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel was installed into."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, timeout=300)
    return target


def _copy(source: Path, target: Path) -> None:
    files = [source] if source.is_file() else [f for f in source.rglob("*") if f.is_file()]
    for file in files:
        if "__pycache__" not in file.parts:
            copy = target / file.relative_to(source) if source.is_dir() else target
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())


def run_outside(installed: Path, cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a Python command that sees the wheel and its dependencies, and not the checkout.

    -S leaves out site-packages' .pth files, and with them the editable install of the checkout;
    the dependencies come back in as a plain folder.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    paths = [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return subprocess.run(
        [sys.executable, "-S", *command],
        cwd=cwd,
        env=env | {"PYTHONPATH": os.pathsep.join(paths), "TERM": "dumb"},
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)


def test_the_wheel_holds_every_module_and_data_file(wheel: Path, repo_root: Path) -> None:
    """A file that setuptools was not told of is missing for users, never in the checkout."""
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        str(file.relative_to(repo_root))
        for package in PACKAGES
        for file in (repo_root / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert not expected - names


def test_the_wheels_modules_are_the_ones_imported(installed: Path, tmp_path: Path) -> None:
    code = (
        "import cluster, workers, scheduler, offload_store\n"
        "for m in (cluster, workers, scheduler, offload_store): print(m.__file__)\n"
    )
    done = run_outside(installed, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    found = [Path(line) for line in done.stdout.split()]
    assert found == [installed / package / "__init__.py" for package in reversed(PACKAGES)]


def test_settings_and_requests_work_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("num_workers: 2\n")
    code = (
        "from cluster.config import EngineConfig\n"
        "from scheduler.sampling_params import SamplingParams\n"
        "SamplingParams(prompt_logprobs=2)\n"
        "print(EngineConfig.load('engine.yaml', env={}).num_workers)\n"
    )
    done = run_outside(installed, tmp_path, "-c", code)
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr


def test_the_command_works_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    script = installed / "bin" / "haversack"
    done = run_outside(installed, tmp_path, str(script), "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
    assert "haversack" in done.stdout
