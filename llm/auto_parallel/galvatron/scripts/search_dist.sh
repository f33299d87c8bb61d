#!/bin/sh
exec sh "$(dirname "$0")/../../../../scripts/search_dist.sh" "$@"
