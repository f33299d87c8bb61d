#!/bin/sh
# The search, from this folder: see scripts/search_dist.sh for its variables.
exec sh "$(dirname "$0")/../../../scripts/search_dist.sh" "$@"
