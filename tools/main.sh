#!/usr/bin/env bash
# The main job on real input: fine-tunes MiniLM, commits every step to a store, and reads every step back bit for bit.
#
#   tools/main.sh [STORE] [options of make_trace.py]
#
# STORE is a directory or a URL; ./trace-store by default.
set -euo pipefail
store=trace-store
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    store=$1
    shift
fi
# A relative directory is the caller's.
case $store in
    *://* | /*) ;;
    *) store=$PWD/$store ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup.sh
set_up

exec "$python" tools/make_trace.py --store "$store" --steps 8 "$@"
