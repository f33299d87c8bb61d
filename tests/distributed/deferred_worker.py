"""One rank of a launch whose communication is deferred and whose steps are guarded.

Arguments: the folder of the messages, a seed, the worker's module, and the worker's own arguments.
"""

import importlib
import sys
from pathlib import Path

from paddlenlp_galvatron.runtime import device
from paddlenlp_galvatron.runtime.groups import run_as_rank, start_world


def main() -> None:
    from deferred import install
    from kernels import forbid_other_kernels
    from no_host_traffic import forbid_host_traffic

    folder, seed, module, *arguments = sys.argv[1:]
    backend = install(Path(folder), int(seed))
    forbid_host_traffic()
    forbid_other_kernels()
    device.loads_kernels = lambda: True  # the first step goes as a GPU's does, the next by the plan's schedule
    worker = importlib.import_module(module)
    sys.argv[1:] = arguments
    start_world()
    worker.main()
    backend.finish()


if __name__ == "__main__":
    run_as_rank(main)
