#!/usr/bin/env bash
# Usage: launch/test.sh [--slow] [PYTEST-ARGUMENT…]
#
# Sets up what is needed (launch/setup.sh; minutes the first time, then a second), then runs ruff, mypy and pytest.
#
#   --slow             also the tests marked slow
#   PYTEST-ARGUMENT    e.g. tests/test_plan.py, -k scalecom, -x; paths are relative to the root of the repository

set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib.sh"

tests=(-m "not slow")
case ${1:-} in
    -h | --help) usage; exit ;;
    --slow) tests=(); shift ;;
esac

"$ROOT/launch/setup.sh"
use_venv
cd "$ROOT"

say "== ruff"
ruff check .
say "== mypy"
mypy
say "== pytest"
exec python -m pytest "${tests[@]}" "$@"
