#!/bin/sh
# Builds the environment that `make` works in, or does nothing where it is there and current.
# Usage: scripts/setup.sh VENV PADDLE_VERSION        PYTHON in the environment chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."
venv=$1
paddle=$2
started=$(date +%s)
log=$(mktemp)
trap 'rm -f "$log"' EXIT

say() { echo "setup: $*"; }
fail() {
    echo "setup: $*" >&2
    exit 1
}

# The first interpreter that runs and fits: one that is merely on the path (a pyenv shim) need not run, and one inside an
# environment stands for the interpreter that this environment was made from.
find_python() {
    for candidate in ${PYTHON:-python3.11 python3 /usr/bin/python3.11 python3.12}; do
        "$candidate" 2>/dev/null - <<'PROBE' && return
import sys
if not (3, 11) <= sys.version_info < (3, 13):
    sys.exit(1)
print(sys._base_executable)
PROBE
    done
    fail "no Python 3.11 or 3.12 was found (tried: ${PYTHON:-python3.11, python3}); install one (Debian, Ubuntu:" \
        "sudo apt-get install python3.11 python3.11-venv python3.11-dev) or name it: make PYTHON=/path/to/python3.11"
}

check_machine() {
    python=$(find_python)
    version=$("$python" -c 'import platform; print(platform.python_version())')
    package=python${version%.*}
    say "[1/5] checking this machine (Python $version)"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "Python $version cannot make virtual environments; install the venv module" \
            "(Debian, Ubuntu: sudo apt-get install $package-venv)"
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$include/Python.h" ] ||
        fail "the headers of Python $version are missing ($include/Python.h); install them" \
            "(Debian, Ubuntu: sudo apt-get install $package-dev)"
    echo 'int main() {}' | ${CXX:-c++} -std=c++17 -fsyntax-only -x c++ - 2>/dev/null ||
        fail "no C++17 compiler was found (tried: ${CXX:-c++}); install one" \
            "(Debian, Ubuntu: sudo apt-get install g++) or name it: CXX=/path/to/compiler make ..."
}

# pip, quiet unless it fails. A lost connection has one clear sentence; everything else is said in pip's own words.
pip_install() {
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@" >"$log" 2>&1 && return
    if grep -qE 'NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|name resolution|Network is unreachable' "$log"; then
        echo "setup: the packages could not be downloaded: no connection to the package index;" \
            "check the network (or pip's own configuration) and run the same command again" >&2
    else
        grep -v '^WARNING' "$log" >&2
        echo "setup: pip failed; see its output above" >&2
    fi
    return 1
}

# Those of the file, with the line of this Paddle instead of another's.
pinned() { sed "s/^paddlepaddle==/# &/; s/^# \(paddlepaddle==$paddle \)/\1/" requirements/pinned.txt; }
pinned | grep -q "^paddlepaddle==$paddle " ||
    fail "PADDLE: requirements/pinned.txt has no line of paddlepaddle==$paddle; add one, and run tools/pin.py"
is_current() { [ -x "$venv/bin/python" ] && [ "$(cat "$venv/$1" 2>/dev/null)" = "$2" ]; }

# Two stamps, written last: of the packages (and of the folder, as an environment cannot be moved), and of the
# sources of the project's own build, this script included.
packages=$( (pwd; pinned) | sha256sum | cut -c1-64)
build="scripts/setup.sh pyproject.toml CMakeLists.txt"
# shellcheck disable=SC2086 - several files
project=$( (echo "$packages"; cat $build search_engine/*.?pp) | sha256sum | cut -c1-64)
is_current packages.stamp "$packages" && is_current project.stamp "$project" && exit 0

check_machine
if is_current packages.stamp "$packages"; then
    say "[2/5] keeping $venv"
    say "[3/5] keeping its packages"
else
    say "[2/5] creating $venv"
    rm -rf "$venv"
    "$python" -m venv "$venv" >"$log" 2>&1 || {
        cat "$log" >&2
        rm -rf "$venv"
        fail "$venv could not be created; the reason is above"
    }
    say "[3/5] installing $(pinned | grep -c '^[^#].*==') pinned packages, paddlepaddle $paddle among them (a few minutes)"
    pinned >"$venv/requirements.txt"
    # Unused files stay uncompiled: of 11,000 Python compiles some 3,000 when it first imports them.
    # The two without a wheel are built by the tools of the list, not by whichever are the newest.
    grep -E '^(--|setuptools|packaging==)' "$venv/requirements.txt" >"$venv/setuptools.txt"
    pip_install --no-deps --no-compile -r "$venv/setuptools.txt" &&
        pip_install --no-deps --no-compile --no-build-isolation -r "$venv/requirements.txt" || {
        rm -rf "$venv"
        exit 1
    }
    echo "$packages" >"$venv/packages.stamp"
fi
say "[4/5] compiling the C++ core"
pip_install --no-deps --no-build-isolation --editable .
say "[5/5] importing everything once"
# Its bytecode is part of an environment, for anybody who wants none next to their own sources: without it every process that
# imports Paddle and PaddleNLP compiles them again, for 8 s.
everything='galvatron_dp_core, hypothesis, paddlenlp.trainer, paddlenlp.transformers, pydantic, pytest, rich.progress'
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c "import $everything" >"$log" 2>&1 || {
    cat "$log" >&2
    fail "the environment does not work; the error is above"
}
echo "$project" >"$venv/project.stamp"
say "$venv is ready: $("$venv/bin/galvatron" --version), paddlepaddle $paddle," \
    "$(du -sm "$venv" | cut -f1) MB, $(($(date +%s) - started)) s"
