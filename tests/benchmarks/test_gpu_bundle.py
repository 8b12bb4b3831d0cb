"""``make gpu-bundle``: what a machine with a GPU and no network is given, and that it uses it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.commands import run_to_end

ROOT = Path(__file__).parents[2]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
LIMIT = 300
TAG = "manylinux_2_17_x86_64.manylinux2014_x86_64"


def make(*words: str, **variables: str) -> str:
    return run_to_end("make", *words, env=os.environ | variables, timeout=LIMIT).stdout


def offer(folder: Path, name: str, python: str) -> None:
    """An index of one wheel more: of the version that constraints.txt names."""
    (version,) = re.findall(rf"^{name}==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    tag = "cp" + python.replace(".", "")
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}-{tag}-{TAG}.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version, python = {version!r}, {python!r}\n")
        wheel.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}-{tag}-{TAG}\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For this Python, of wheels that are offered for this one and another one."""
    offered, folder = tmp_path_factory.mktemp("offered"), tmp_path_factory.mktemp("made") / "it"
    for name in ("msgspec", "pyzmq", "safetensors"):
        for python in (HERE, "3.99"):
            offer(offered, name, python)
    words = ("gpu-bundle", f"PYTHON={sys.executable}", f"BUNDLE={folder}", f"BUNDLE_PYTHON={HERE}")
    make(*words, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(offered))
    return folder


def test_it_holds_what_is_wanted_for_that_python_and_the_extensions(bundle: Path) -> None:
    assert {path.name for path in bundle.iterdir()} == {HERE}
    assert {path.name for path in (bundle / HERE).iterdir()} == {"site", "built"}
    for name in ("msgspec", "pyzmq", "safetensors"):
        assert f"{HERE!r}" in (bundle / HERE / "site" / f"{name}.py").read_text()
    built = sorted(path.relative_to(bundle / HERE / "built") for path in bundle.rglob("*.so"))
    assert list(map(str, built)) == ["device_comm/_native.abi3.so", "shm_broadcast/_native.abi3.so"]
    code = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
for path in sys.argv[1:]:
    spec = spec_from_file_location("its._native", path)
    spec.loader.exec_module(module_from_spec(spec))
"""
    paths = [str(bundle / HERE / "built" / path) for path in built]
    subprocess.run([sys.executable, "-c", code, *paths], check=True, timeout=60)


@pytest.mark.parametrize("goal", ["gpu-test", "gpu-report"])
def test_it_is_used_by_the_python_that_it_is_for(goal: str, bundle: Path, tmp_path: Path) -> None:
    shown = make("-n", goal, f"PYTHON={sys.executable}", f"BUNDLE={bundle}")
    site = f"PYTHONPATH={bundle / HERE / 'site'} {sys.executable}"
    assert shown.count(f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {site}") == 2
    assert f"cp -R {bundle / HERE / 'site'}/../built/. ." in shown
    assert "setup.py" not in shown
    other = make("-n", goal, f"PYTHON={sys.executable}", f"BUNDLE={tmp_path}")
    assert "PYTHONPATH" not in other
    assert "setup.py -q build_ext --inplace" in other
