import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "fixtures" / "faulty_disk.c"


@pytest.fixture(scope="session")
def shim(tmp_path_factory) -> Path:
    """The preloaded library that watches a disk, slows it down, or lets it fail."""
    library = tmp_path_factory.mktemp("shim") / "faulty_disk.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs the program cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-o", library, SOURCE, "-ldl"], check=True)
    return library
