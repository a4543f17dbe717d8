#!/usr/bin/env bash
# Sets up what is missing, then checks everything: lint, layout, types, SPEC.md, the second reader, tests. Arguments go to pytest.
#
#   tools/test.sh                     everything
#   tools/test.sh -m 'not slow'       the quick round
#   HYPOTHESIS_PROFILE=nightly tools/test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup.sh
set_up
set_up_servers
set_up_node

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
"$python" tools/check_spec.py
"$python" tools/check_vectors.py

if [ -n "$has_node" ]; then
    (cd tools/reader-ts && npm ci --silent --no-audit --no-fund && npm test)
    "$python" conformance/run.py --strict --adapter 'node tools/reader-ts/dist/adapter.js'
    "$python" tools/mutate.py --seconds 20 --count 100000 \
        --adapter "$python conformance/adapters/deltaformat_reference.py" --adapter 'node tools/reader-ts/dist/adapter.js'
elif [ -n "${CI:-}" ]; then
    echo 'test: the TypeScript reader needs Node 20 or newer' >&2
    exit 1
else
    echo 'test: the TypeScript reader is not tested: it needs Node 20 or newer' >&2
fi

exec "$python" -m pytest -n 2 "$@"
