#!/bin/sh
# Measures what a model's layers and its vocabulary layers keep in memory; writes configs/memory_profiling_*.json.
# profile_model_args.sh has MODEL_PROFILER_ARGS, MODEL_ARGS and all variables; what is set here before it is read holds.
set -euf

WHAT=memory
PROFILE_MODE=${PROFILE_MODE:-static} # static or sequence

# shellcheck source=llm/auto_parallel/galvatron/scripts/profile_model_args.sh
. "$(dirname "$0")/profile_model_args.sh"
