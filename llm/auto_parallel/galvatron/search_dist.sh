#!/bin/sh
# search_dist.sh in scripts/, which has the variables, from this folder.
exec sh "$(dirname "$0")/scripts/search_dist.sh" "$@"
