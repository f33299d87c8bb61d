#!/bin/sh
# Measures the memory of a model's layers and its vocabulary layers; writes configs/memory_profiling_*.json.
# profile_model_args.sh has MODEL_PROFILER_ARGS, MODEL_ARGS and all variables; variables that are set here before it is read hold.
set -euf

WHAT=memory
PROFILE_MODE=${PROFILE_MODE:-static} # static or sequence

# shellcheck source=llm/auto_parallel/galvatron/scripts/profile_model_args.sh
. "$(dirname "$0")/profile_model_args.sh"
