#!/usr/bin/env bash
# Usage: launch/release.sh [TAG]
#
# Builds the sdist and the wheel in dist/, checks them with twine, and installs the wheel in an empty virtual
# environment. There the numpy core is tried, then, with the extra "cli", the command.
# With TAG (v0.1.0) the version in hvdcompress/__init__.py must be the tag's, and CHANGELOG.md must have a section of it
# with a date.
#
# Environment: PYTHON (default: python3). Nothing is published; .github/workflows/release.yml does that.

set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib.sh"
if [[ ${1:-} == -h || ${1:-} == --help ]]; then usage; exit; fi
cd "$ROOT"

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' hvdcompress/__init__.py)
if [[ -n ${1:-} ]]; then
    [[ $1 == "v$version" ]] || die "release.sh: the tag is $1, and hvdcompress/__init__.py says $version"
    grep -qE "^## ${version//./\\.} - [0-9]{4}-[0-9]{2}-[0-9]{2}$" CHANGELOG.md ||
        die "release.sh: CHANGELOG.md has no section \"## $version - YYYY-MM-DD\""
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONNOUSERSITE=1
unset PYTHONPATH
say "== build"
"${PYTHON:-python3}" -m venv "$work/build"
"$work/build/bin/pip" install -q build twine
rm -rf dist
"$work/build/bin/python" -m build --outdir dist . >"$work/build.log" 2>&1 || die "$(tail -n 20 "$work/build.log")"
say "== twine check"
"$work/build/bin/twine" check --strict dist/*

say "== the wheel in an empty environment"
"${PYTHON:-python3}" -m venv "$work/empty"
wheel=$ROOT/dist/hvdcompress-$version-py3-none-any.whl
"$work/empty/bin/pip" install -q "$wheel"
cd "$work"  # not the sources
empty/bin/python - <<'PYTHON'
import numpy as np
from hvdcompress.loopback import Loopback

outs = Loopback("scalecom", world_size=4, density=0.01).allreduce([np.ones(4096, np.float32)] * 4, name="w")
assert all((out == outs[0]).all() for out in outs) and outs[0].any()
PYTHON
asked=$(empty/bin/hvdcompress --version 2>&1 || true)
[[ $asked == *"pip install 'hvdcompress[cli]'" ]] || die "release.sh: without its extra the command says: $asked"
empty/bin/pip install -q "$wheel[cli]"
[[ $(empty/bin/hvdcompress --version) == "$version" ]] || die "release.sh: the installed command has another version"
empty/bin/hvdcompress doctor >/dev/null
empty/bin/hvdcompress methods --json >/dev/null
empty/bin/hvdcompress configs topk >plan.yaml
empty/bin/python -c 'import hvdcompress; assert hvdcompress.load_plan("plan.yaml") == hvdcompress.load_plan({"method": "topk"})'
alone=$(empty/bin/hvdcompress advise --model mine:make_model --data mine:make_batch 2>&1 || true)
[[ $alone == *"pip install 'hvdcompress[torch]'" ]] || die "release.sh: without PyTorch advise says: $alone"
say "fine: dist/ has $(cd "$ROOT/dist" && echo *)"
