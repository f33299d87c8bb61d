#!/bin/sh
# The profile of a model's times, from this folder: see scripts/profile_computation.sh for its variables.
exec sh "$(dirname "$0")/../../../scripts/profile_computation.sh" "$@"
