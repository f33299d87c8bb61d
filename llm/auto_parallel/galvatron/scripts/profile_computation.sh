#!/bin/sh
# Times a model's layers and its vocabulary layers; writes configs/computation_profiling_*.json.
# profile_model_args.sh has MODEL_PROFILER_ARGS, MODEL_ARGS and all variables; variables that are set here before it is read hold.
set -euf

WHAT=computation
PROFILE_MODE=${PROFILE_MODE:-batch} # static, batch or sequence

# shellcheck source=llm/auto_parallel/galvatron/scripts/profile_model_args.sh
. "$(dirname "$0")/profile_model_args.sh"
