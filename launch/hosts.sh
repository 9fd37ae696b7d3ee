#!/usr/bin/env bash
# Usage: launch/hosts.sh --hosts 4 --rate 1gbit -- COMMAND …     (as root)
#
# Run a command on emulated hosts: `python -m experiments hosts` with the .venv/ of this repository, whose horovodrun and
# mpirun sudo would leave out. --help lists the options.

set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib.sh"
use_venv
exec python -m experiments hosts "$@"
