#!/usr/bin/env bash
# Usage: launch/ring.sh [-n RANKS] [-H HOST:SLOTS,…] [--] [ARGUMENT…]
#
# The ring all-reduce experiment across MPI ranks, which ends in a table, a plot and a JSON file. The arguments go to
# `python -m experiments.ring.run`, for instance
#     launch/ring.sh -n 4 --method "topk density=0.01" --elements 10000,1000000
#     launch/ring.sh -n 8 -H node1:4,node2:4 --out runs/ring
#
#   -n RANKS    how many ranks mpirun starts (default: 4)
#   -H HOSTS    hosts and their slots, as mpirun takes them (default: this machine)
#
# Uses .venv/ where launch/setup.sh made one, or else the mpirun and python that are on the PATH.
# Environment: MPIRUN_ARGS, more arguments for mpirun, such as "--mca btl_tcp_if_include eth0".

set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib.sh"

ranks=4 hosts=()
while (($#)); do
    case $1 in
        -h | --help) usage; exit ;;
        -n | -np) ranks=${2:?-n needs a number}; shift 2 ;;
        -H) hosts=(-H "${2:?-H needs hosts}"); shift 2 ;;
        --) shift; break ;;
        *) break ;;
    esac
done
[[ $ranks =~ ^[1-9][0-9]*$ ]] || die "ring.sh: -n $ranks is not a number of ranks"
if [[ -d $VENV ]]; then use_venv; else suit_ranks; fi
command -v mpirun >/dev/null || die "ring.sh: there is no mpirun: pip install 'hvdcompress[mpi]', or launch/setup.sh"
# more ranks than cores are in order on one machine: the table says so
[[ ${#hosts[@]} -gt 0 ]] || hosts=(--oversubscribe)
# shellcheck disable=SC2086  # a list of arguments
exec mpirun -np "$ranks" "${hosts[@]}" ${MPIRUN_ARGS:-} python -m mpi4py -m experiments.ring.run "$@"
