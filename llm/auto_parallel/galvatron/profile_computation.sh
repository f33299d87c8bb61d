#!/bin/sh
# profile_computation.sh in scripts/, which has the variables, from this folder.
exec sh "$(dirname "$0")/scripts/profile_computation.sh" "$@"
