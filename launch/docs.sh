#!/usr/bin/env bash
# Usage: launch/docs.sh [--help]
#
# Builds the documentation site in build/site/: open build/site/index.html. The first time it makes build/docs-venv/ with
# Sphinx and the library (about a minute); no framework is needed. The site loads nothing from the net.
# A dead link, a page that docs/nav.py lacks, or a docstring that cannot be read is an error.
# Pages of methods are made from their files. Other generated pages are committed: python docs/build.py writes them.
#
# Environment:
#   PYTHON    interpreter to build with, 3.11 to 3.14 (default: python3)

set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib.sh"
case ${1:-} in
    -h | --help) usage; exit ;;
    "") ;;
    *) die "docs.sh: unknown argument $1; see $0 --help" ;;
esac

cd "$ROOT"
venv=build/docs-venv
stamp=$venv/made-of
digest=$({ cat docs/requirements.txt setup.cfg; sed '/^\[tool\./,$d' pyproject.toml; } | sha256sum)
if [[ $(cat "$stamp" 2>/dev/null) != "$digest" ]]; then
    say "Making $venv …"
    "${PYTHON:-python3}" -m venv --clear "$venv"
    "$venv/bin/pip" install -q --disable-pip-version-check -r docs/requirements.txt -e .
    echo "$digest" >"$stamp"
fi
"$venv/bin/python" -m sphinx -W --keep-going -q -b html docs build/site
say "Built build/site/index.html"
