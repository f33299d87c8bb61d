#!/bin/sh
# Builds a wheel for each CPython from 3.11 to 3.13 that is on the path, in build/wheels, each in an environment of its own.
set -eu
cd "$(dirname "$0")/.."
built=0
for version in 3.11 3.12 3.13; do
    "python$version" --version >/dev/null 2>&1 || { echo "wheels: no python$version here; skipped"; continue; }
    venv=$(mktemp -d)
    "python$version" -m venv "$venv"
    "$venv/bin/python" -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir build/wheels .
    rm -rf "$venv"
    built=$((built + 1))
done
ls build/wheels
[ "$built" -gt 0 ]
