#!/bin/sh
exec sh "$(dirname "$0")/../llm/auto_parallel/galvatron/scripts/profile_computation.sh" "$@"
