"""PaddleNLP's way to say where ranks run: the line that starts Paddle's launcher, as options of ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...plan import UserError
from .hosts import own_rank

# Option of a launcher -> ours.
SAID = {
    "nnodes": "num_nodes",
    "nproc_per_node": "num_gpus_per_node",
    "rank": "node_rank",
    "node_rank": "node_rank",
    "master_addr": "master_addr",
    "master_port": "master_port",
}
DEVICES = ("gpus", "devices")
IDLE = ("log_dir", "log_level", "job_id")  # what is printed is shown, and logs go when all went well
HEAD = ("paddle.distributed.launch", "torch.distributed.launch", "torchrun")


def options_of_launch(line: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options with those that a launcher's line says, where they are not given; `--gpus` become visible to ranks.

    Raises UserError: it starts something else, or says what there is no option for.
    """
    words = line.split()
    start = next((number for number, word in enumerate(words) if word.endswith(HEAD)), None)
    if start is None:
        raise UserError(f"launch: {line!r} starts none of {', '.join(HEAD)}; leave it out")
    found: dict[str, Any] = {}
    rest = iter(words[start + 1 :])
    for word in rest:
        name, equals, behind = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        value = behind if equals else next(rest, None)
        if value is None:
            raise UserError(f"launch: --{name}: a value is missing")
        if name == "ips":
            hosts = value.split(",")
            found |= {"num_nodes": str(len(hosts)), "master_addr": hosts[0]}
            if len(hosts) > 1 and "node_rank" not in given:
                found["node_rank"] = str(own_rank(hosts, "launch: --ips"))
        elif name == "master":
            address, _, port = value.removeprefix("etcd://").rpartition(":")
            found |= {"master_addr": address, "master_port": port}
        elif name in DEVICES:
            os.environ["CUDA_VISIBLE_DEVICES"] = value
            found["num_gpus_per_node"] = str(len(value.split(",")))
        elif name in SAID:
            found[SAID[name]] = value
        elif name not in IDLE:
            raise UserError(f"launch: --{name} has no counterpart here; leave it out")
    return found | dict(given)
