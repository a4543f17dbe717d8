#!/usr/bin/env bash
# Sets up what is missing, then checks everything: lint, layout, types, SPEC.md, tests. Arguments go to pytest.
#
#   tools/test.sh                     everything
#   tools/test.sh -m 'not slow'       the quick round
#   HYPOTHESIS_PROFILE=nightly tools/test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup.sh
set_up
set_up_servers

"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
"$python" tools/check_spec.py
exec "$python" -m pytest -n 2 "$@"
