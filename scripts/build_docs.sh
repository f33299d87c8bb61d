#!/bin/sh
# Builds the documentation's site of both languages in build/site, in an environment of its own.
# Usage: scripts/build_docs.sh VENV
set -eu
cd "$(dirname "$0")/.."
venv=$1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
stamp=$( (pwd; cat requirements/docs.txt) | sha256sum | cut -c1-64)
if [ "$(cat "$venv/packages.stamp" 2>/dev/null)" != "$stamp" ]; then
    echo "docs: installing $(grep -c == requirements/docs.txt) pinned packages into $venv"
    rm -rf "$venv"
    "${PYTHON:-python3.11}" -m venv "$venv"
    grep -e '^--' -e '^setuptools==' requirements/docs.txt >"$venv/setuptools.txt"  # builds packages without a wheel
    for list in "$venv/setuptools.txt" requirements/docs.txt; do
        "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation -r "$list"
    done >"$log" 2>&1 || {
        cat "$log" >&2
        rm -rf "$venv"
        exit 1
    }
    echo "$stamp" >"$venv/packages.stamp"
fi
rm -rf build/site
for config in docs/mkdocs.yml docs/mkdocs.zh.yml; do
    NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -W ignore -m mkdocs build --quiet --strict --config-file "$config"
done
printf '<!doctype html><meta charset="utf-8"><title>paddlenlp_galvatron</title>%s\n' \
    '<meta http-equiv="refresh" content="0; url=en/index.html"><a href="en/index.html">English</a> <a href="zh/index.html">中文</a>' \
    >build/site/index.html
echo "docs: open build/site/index.html"
