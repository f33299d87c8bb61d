#!/bin/sh
# The profile of a model's memory, from this folder: see scripts/profile_memory.sh for its variables.
exec sh "$(dirname "$0")/../../../scripts/profile_memory.sh" "$@"
