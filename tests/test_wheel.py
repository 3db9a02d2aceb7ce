"""What a wheel carries, and that it works where nothing was compiled and no CUDA is."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dmtp_kernels"
pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or not all(map(importlib.util.find_spec, ("scikit_build_core", "pybind11", "pip"))),
    reason="a wheel needs cmake, pip, scikit-build-core and pybind11",
)
if (PACKAGE / "_build.py").exists():
    pytest.skip("compiled in place: the wheel would carry what lies in the source tree", allow_module_level=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel as it is built where there is no compiler: the whole of it but the two compiled files."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", f"--config-settings=build-dir={folder / 'build'}"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(ROOT), "-w", str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "CXX": "/nowhere/c++", "PATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_it_carries_the_package_its_stub_and_its_models(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    assets = {str(path.relative_to(ROOT)) for path in (PACKAGE / "assets").iterdir()}
    assert {"dmtp_kernels/assets/smollm2.safetensors", "dmtp_kernels/assets/tiny.safetensors"} <= assets
    assert sources | assets | {"dmtp_kernels/py.typed", "dmtp_kernels/_C.pyi", "dmtp_kernels/_build.py"} <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"dmtp_kernels"}, "tests, sources"
    assert not [name for name in names if "__pycache__" in name]


def test_it_works_from_any_folder_without_compiler_and_cuda(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import sys\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in type(f).__module__.lower()]\n"
        "import torch, dmtp_kernels\n"
        "from dmtp_kernels import backends, doctor\n"
        "from dmtp_kernels.ops.accept import accept_prefix\n"
        "ids = torch.tensor([[1, 2, 3]])\n"
        "print(dmtp_kernels.__file__)\n"
        "print(accept_prefix(ids, ids, stop_ids=ids[0, :0], budget=torch.tensor([9])).commit_len.tolist())\n"
        "print(backends.compiled_missing(), backends.cuda_missing(), sep='\\n')\n"
        "print(sorted(doctor.report()['checkpoint']['files']))\n"
    )
    settings = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file, commit, no_module, no_cuda, models = done.stdout.splitlines()
    assert file == str(tmp_path / "site" / "dmtp_kernels" / "__init__.py") and commit == "[1]"
    assert no_module == "dmtp_kernels._C is missing: it was built without a C++ compiler"
    assert no_cuda == "dmtp_kernels/_cuda.so is missing: it was built without a C++ compiler"
    assert models == "['smollm2.safetensors', 'tiny.safetensors']"
