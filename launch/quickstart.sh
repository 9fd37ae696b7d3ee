#!/usr/bin/env bash
# Usage: launch/quickstart.sh [ARGUMENT…]
#
# Sets up what is needed (launch/setup.sh; minutes the first time, then a second) and trains two small models on two
# ranks with every method of configs/experiments/quickstart.yaml. It ends with a table, and writes a report to
# runs/quickstart/ in the repository. Arguments go to `python -m experiments run`, for instance `-np 4`; paths among them are
# relative to the root of the repository.

set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib.sh"
if [[ ${1:-} == -h || ${1:-} == --help ]]; then usage; exit; fi

"$ROOT/launch/setup.sh"
use_venv
cd "$ROOT"
exec python -m experiments run quickstart "$@"
