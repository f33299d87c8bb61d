#!/bin/sh
# profile_memory.sh in scripts/, which has the variables, from this folder.
exec sh "$(dirname "$0")/scripts/profile_memory.sh" "$@"
