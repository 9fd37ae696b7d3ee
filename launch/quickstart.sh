#!/usr/bin/env bash
# Usage: launch/quickstart.sh [ARGUMENT…]
#
# Sets up what is needed (launch/setup.sh; minutes the first time, then a second) and trains a small net on two ranks, with
# and without compression. It ends with a table of bytes, accuracy and times, which is also in runs/quickstart/ in the
# repository. Arguments go to `python -m experiments quickstart`: `-np 4` for four ranks, `--full` for more methods and a
# second net.

set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib.sh"
if [[ ${1:-} == -h || ${1:-} == --help ]]; then usage; exit; fi

"$ROOT/launch/setup.sh"
use_venv
cd "$ROOT"
exec python -m experiments quickstart --driver horovod "$@"
