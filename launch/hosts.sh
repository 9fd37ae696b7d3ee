#!/usr/bin/env bash
# Usage: launch/hosts.sh COMMAND …     (as root)
#
# Emulated hosts on this machine: runs the package's script, with .venv/'s horovodrun and mpirun on the PATH, which sudo
# leaves out. `launch/hosts.sh --help` lists its commands.

set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib.sh"
PATH=$PATH:$VENV/bin exec bash "$ROOT/experiments/cluster/hosts.sh" "$@"
