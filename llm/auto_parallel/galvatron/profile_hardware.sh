#!/bin/sh
# Writes the five scripts that measure a cluster, from this folder: see scripts/profile_hardware.sh for its variables.
exec sh "$(dirname "$0")/../../../scripts/profile_hardware.sh" "$@"
