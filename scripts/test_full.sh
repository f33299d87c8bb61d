#!/bin/sh
# Runs every test, slow ones too, part by part, and names the parts that failed at the end. A part that has passed on the
# same code is not run again, so a run that was interrupted continues where it stopped. Hypothesis draws new examples.
# Usage: scripts/test_full.sh VENV
set -eu
cd "$(dirname "$0")/.."
pytest=$1/bin/pytest
code=$( (cd "$1" && pwd; git rev-parse HEAD; git diff HEAD) | sha256sum | cut -c1-16)
passed=.test-full/$code
failed=
mkdir -p "$passed"

run() { # name, then arguments of pytest
    name=$1
    shift
    if [ -e "$passed/$name" ]; then
        echo "test-full: $name passed before"
        return
    fi
    started=$(date +%s)
    "$pytest" --hypothesis-profile=new --numprocesses 3 --dist worksteal "$@" || { failed="$failed $name"; return; }
    touch "$passed/$name"
    echo "test-full: $name passed in $(($(date +%s) - started)) s"
}

for folder in tests/*/; do
    case $folder in *__pycache__/) continue ;; esac
    run "$(basename "$folder")" "$folder"
done
[ -z "$failed" ] || { echo "test-full: these parts failed:$failed" >&2; exit 1; }
