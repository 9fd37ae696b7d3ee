#!/usr/bin/env bash
# Usage: netns_agent.sh [SSH-OPTION…] HOST COMMAND…
#
# Takes ssh's place among the emulated hosts of hosts.sh: runs COMMAND on HOST, by a shell, as ssh does.
# mpirun is told of it (plm_rsh_agent); horovodrun finds it as `ssh` on its PATH.

set -euo pipefail

words=()
while (($#)) && ((${#words[@]} < 2)); do  # options stand before the host and, as horovodrun has it, behind it
    case $1 in
        -[bcDEeFIiJLlmOopQRSWw]) shift 2 ;;  # those with a value in the next word
        -*) shift ;;
        *)
            words+=("$1")
            shift
            ;;
    esac
done
((${#words[@]} == 2)) || { echo "netns_agent.sh: give a host and a command" >&2; exit 1; }
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
command="${words[1]} $*"
exec bash "$here/hosts.sh" exec "${words[0]}" bash -c "${command% }"
