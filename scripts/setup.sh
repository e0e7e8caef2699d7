#!/bin/sh
# Make (or re-use) a virtual environment with the project and its development tools in it, pinned by constraints.txt.
#   VENV=.venv            where
#   PYTHON_VERSION=3.11   that version only; default: the newest of 3.13, 3.12, 3.11 found on PATH or in pyenv
#   EXTRAS=dev            optional dependencies, comma-separated (dev,gpu)
# Uses uv when it is there, else venv and pip. Exits 3 if there is no such Python.
set -eu
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
EXTRAS=${EXTRAS:-dev}
VERSIONS=${PYTHON_VERSION:-3.13 3.12 3.11}
STAMP="$VENV/.made-from"
made_from="$EXTRAS $(cat pyproject.toml constraints.txt | cksum)"

say() { printf '%s\n' "setup: $*" >&2; }

# The version of an interpreter as 3.12, or nothing if it does not run (a pyenv shim of a version that is not active).
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

find_uv() { # on PATH, where its installer puts it, or beside some Python of pyenv
    for candidate in uv "$HOME"/.local/bin/uv "$HOME"/.cargo/bin/uv "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/uv; do
        "$candidate" --version >/dev/null 2>&1 && { printf '%s' "$candidate"; return 0; }
    done
    return 1
}

find_python() {
    for version in $VERSIONS; do
        for candidate in "python$version" python3 python; do
            path=$(command -v "$candidate" 2>/dev/null) || continue
            [ "$(version_of "$path")" = "$version" ] && { printf '%s' "$path"; return 0; }
        done
        for root in "${PYENV_ROOT:-$HOME/.pyenv}" "$HOME/.pyenv"; do
            for path in "$root/versions/$version".*/bin/python; do
                [ "$(version_of "$path")" = "$version" ] && { printf '%s' "$path"; return 0; }
            done
        done
    done
    return 1
}

usable() { # the environment runs, has one of the wanted versions, and can be installed into
    [ -x "$VENV/bin/python" ] || return 1
    [ -n "$uv" ] || "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || return 1
    have=$(version_of "$VENV/bin/python")
    [ -n "$have" ] || return 1
    for version in $VERSIONS; do [ "$have" = "$version" ] && return 0; done
    return 1
}

uv=$(find_uv) || uv=
if usable && [ "$(cat "$STAMP" 2>/dev/null || true)" = "$made_from" ]; then
    exit 0
fi

if ! usable; then
    python=$(find_python) || python=
    if [ -z "$python" ] && [ -n "$uv" ] && [ -z "${PYTHON_VERSION:-}" ]; then
        python=3.13 # uv fetches one
    fi
    if [ -z "$python" ]; then
        say "no Python of version $VERSIONS found on PATH or in pyenv; install one (3.12 or newer brings a newer JAX)"
        exit 3
    fi
    say "making $VENV with $python"
    rm -rf "$VENV"
    if [ -n "$uv" ]; then
        "$uv" venv --quiet --python "$python" "$VENV"
    elif ! "$python" -m venv "$VENV"; then
        say "python -m venv failed; on Debian and Ubuntu install python3-venv, or install uv"
        exit 1
    fi
fi

rm -f "$STAMP"
say "installing into $VENV (seconds with uv, some minutes with pip)"
if [ -n "$uv" ]; then
    # Bytecode now, as pip does: else every process compiles JAX's sources anew where Python is told to write none.
    "$uv" pip install --quiet --compile-bytecode --python "$VENV/bin/python" --constraint constraints.txt --editable ".[$EXTRAS]"
else
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$EXTRAS]"
fi
printf '%s' "$made_from" >"$STAMP"
say "ready: $("$VENV/bin/python" -c 'import sys, jax; print("Python %d.%d.%d, jax %s" % (*sys.version_info[:3], jax.__version__))')"
