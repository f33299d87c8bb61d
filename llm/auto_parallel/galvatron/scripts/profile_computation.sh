#!/bin/sh
exec sh "$(dirname "$0")/../../../../scripts/profile_computation.sh" "$@"
