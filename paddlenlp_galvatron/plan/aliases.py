"""Names of options: Galvatron and its PaddleNLP port name the same things differently. One table for all commands."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from .errors import UserError

# Other name -> our name.
ALIASES = {
    "memory_upper_limit": "memory_constraint",
    "max_tp_size": "max_tp_deg",
    "max_pp_size": "max_pp_deg",
    "bsz_step": "bsz_scale",
    "search_granularity": "fine_grained_mode",
    "disable_ulysses": "disable_sp",
    "disable_tp_consec": "tp_consec",  # in Galvatron it switches off the search of strided groups
    "mixed_precision_type": "mixed_precision",
    "time_profile_data_path": "time_profiling_path",
    "memory_profile_data_path": "memory_profiling_path",
    "allreduce_coe_path": "allreduce_bandwidth_config_path",
    "p2p_coe_path": "p2p_bandwidth_config_path",
    "num_hidden_layers": "num_layers",
    "layernum": "num_layers",
    "ffn_hidden_size": "intermediate_size",
    "num_query_groups": "num_key_value_heads",
    "layer_num_list": "layernum_list",
    "profile_fixed_seq_length_list": "profile_seq_length_list",
    "accumulate_allreduce_grads_in_fp32": "amp_master_grad",
}
# Words that an option takes by its other name -> the value by our name.
WORDS = {"search_granularity": {"coarse-grained": "0", "fine-grained": "1"}}
# Options with nothing to do here: the value at which they change nothing, and why there is no other.
ABSENT = {
    "recommend_min_bsz": ("0", "the search needs no head start; give min_bsz"),
    "use_pipeline_costmodel": ("1", "every pipeline is simulated"),
    "costmodel_coe": ("1", "predicted times are not scaled; profile again if they are off"),
    "profile_gpu_num": (None, "the name of the all-reduce file says which cluster was measured; leave it out"),
    "mpi_path": (None, "ranks are started without MPI; for nccl-tests use galvatron profile import-nccl-tests"),
    "nccl_test_dir": (None, "messages go through Paddle; for nccl-tests use galvatron profile import-nccl-tests"),
    "envs": (None, "ranks get the environment of the command; set the variables there"),
    "profile_type": (None, "computation and memory are commands of their own"),
    "profile_dp_type": (None, "parts are measured without data parallelism, so it changes nothing; leave it out"),
    "profile_unit": ("all", "layers are measured whole"),
    "shape_order": (None, "the layers are PaddleNLP's own, in their order; leave it out"),
    "make_vocab_size_divisible_by": (None, "the vocabulary is padded to a multiple of its degree; leave it out"),
    "extra_args_str": (None, "there is no other launcher that it could go to; leave it out"),
    "set_experts_manually": ("0", "models with experts are not supported"),
    "disable_cp": ("1", "context parallelism is not supported"),
}


def canonical_name(name: str) -> str:
    """Name of an option without dashes in front, with underscores, its alias resolved."""
    name = _plain(name)
    return ALIASES.get(name, name)


def canonical_value(name: str, value: str) -> str:
    """A value given under any name of an option, as it is given under the canonical name."""
    return WORDS.get(_plain(name), {}).get(value, value)


def is_absent(name: str, value: object) -> bool:
    """Whether an option has nothing to do here and may be left out. Raises UserError where its value asks for more."""
    plain = _plain(name)
    if plain not in ABSENT:
        return False
    neutral, reason = ABSENT[plain]
    if str(value) not in (neutral, "None"):
        raise UserError(f"{name}: {value} is not supported: {reason}")
    return True


def did_you_mean(given: str, known: Iterable[str], prefix: str = "") -> str:
    """The remedy for a misspelt name, which may have been meant as a known one or as an alias of one."""
    names = sorted(known)
    aliases = [alias for alias, name in ALIASES.items() if name in names]
    close = difflib.get_close_matches(_plain(given), [*names, *aliases], n=1)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return "known: " + ", ".join(prefix + name for name in names)


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
