#!/usr/bin/env bash
# The benchmark on real traces: fine-tunes MiniLM at two learning rates, once, then measures everything.
#
#   tools/bench/run.sh [options of `deltaformat bench`]
#
# The traces stay in build/bench/traces; the document and the figure of each run go to build/bench unless --json and --plot say otherwise;
# paths count from the repository's root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tools/setup.sh
set_up
# A peer; without it a row of the table says so. It needs nothing but itself here.
"$python" -m pip install --quiet --no-input --disable-pip-version-check --no-deps 'moonclip==0.3.1' || true

for lr in 3e-6 1e-6; do
    trace=build/bench/traces/lr-$lr
    if [ ! -e "$trace/made" ]; then
        rm -rf "$trace"
        mkdir -p "$trace"
        echo "bench: making a trace at lr $lr" >&2
        "$python" tools/make_trace.py --store "$trace" --steps 24 --lr "$lr" >&2
        touch "$trace/made"
    fi
done

name=bench
given=(--trace build/bench/traces)
case " $* " in *" --trace "*) given=() ;; esac
case " $* " in *" --rebase "*) name=rebase given=() ;; esac # 200 steps: synthetic, unless --trace names a store of as many
exec "$python" -m deltaformat bench "${given[@]}" --json "build/bench/$name.json" --plot "build/bench/$name.png" "$@"
