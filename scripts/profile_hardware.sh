#!/bin/sh
. "$(dirname "$0")/../llm/auto_parallel/galvatron/scripts/profile_hardware.sh" # read, not started: it writes scripts next to $0
