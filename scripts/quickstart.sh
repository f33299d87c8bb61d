#!/bin/sh
# Measures this machine, searches a plan and trains with it; everything lands in runs/quickstart.
set -eu
cd "$(dirname "$0")/.."
exec "${GALVATRON:-galvatron}" quickstart "$@"
