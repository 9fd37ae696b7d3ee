#!/usr/bin/env bash
# Usage: launch/test.sh [--slow] [--changed] [PYTEST-ARGUMENT…]
#
# Sets up what is needed (launch/setup.sh; minutes the first time, then a second), then runs ruff, mypy and pytest, folder
# by folder: tests/unit on all cores, tests/ranks, tests/launched and tests/chaos with two launches at a time, tests/hosts
# one test at a time. The last line sums them up; the exit status is 0 only if nothing failed.
#
#   --slow             also the tests marked slow
#   --changed          only the tests that the changes since main can affect (tests/changed.py): minutes at most
#   PYTEST-ARGUMENT    e.g. tests/unit/plan/test_plan.py, -k scalecom, -x; paths begin with tests/

set -euo pipefail
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/lib.sh"

marks="not slow"
case ${1:-} in
    -h | --help) usage; exit ;;
    --slow) marks=""; shift ;;
esac

"$ROOT/launch/setup.sh" --frameworks torch,tensorflow --tests
use_venv
cores=$(env -u OMP_NUM_THREADS nproc)  # nproc goes by that variable
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE  # some hundred processes are started: each would compile the package for itself
cd "$ROOT"

say "== ruff"
ruff check .
say "== mypy"
mypy

log=$(mktemp)
trap 'rm -f "$log"' EXIT
summaries="" failed=0 found=""

paths=() options=()
for argument in "$@"; do
    if [[ $argument == tests/* ]]; then paths+=("$argument"); else options+=("$argument"); fi
done
[[ ${#paths[@]} != 0 ]] || paths=(tests/unit tests/ranks tests/launched tests/hosts tests/chaos)

# run FOLDERS OPTION…: pytest on the paths in these folders, with its last line noted. That nothing is found is an error
# only if it always is.
run() {
    local status=0 chosen=() path
    for path in "${paths[@]}"; do
        if [[ $path =~ ^tests/($1)(/|$) ]]; then chosen+=("$path"); fi
    done
    [[ ${#chosen[@]} != 0 ]] || return 0
    say "== pytest ${chosen[*]}"
    python -m pytest -m "$marks" "${@:2}" "${options[@]}" "${chosen[@]}" 2>&1 | tee "$log" || status=$?
    summaries+=$(tail -n 1 "$log")$'\n'
    ((status <= 1 || status == 5)) || summaries+="1 error"$'\n'  # in pytest itself: it does not count that
    [[ $status == 5 ]] || found=yes
    [[ $status == 0 || $status == 5 || $failed != 0 ]] || failed=$status
    [[ $status != 2 ]] || exit 2  # interrupted
}

run unit -n "$cores"
# While the ranks of one launch wait for each other, another's work. tests/ranks/conftest.py groups the tests by launch.
at_a_time=$((cores > 1 ? 2 : 1))
run "ranks|launched" -n $at_a_time --dist loadgroup --no-loadscope-reorder
run hosts  # ranks on emulated hosts are bound to processors: one test at a time
# Most of their time these tests wait. The slow ones replace ranks within seconds that they count: one at a time.
[[ -n $marks ]] || at_a_time=1
run chaos -n $at_a_time

# "2 failed, 30 passed, 4 skipped in 5.1s" of each, added up
awk '
    { for (i = 2; i <= NF; i++) {
        word = $i; sub(/,$/, "", word)
        if (word ~ /^(failed|passed|skipped|errors?|xfailed|xpassed|warnings?)$/) {
            sub(/^error$/, "errors", word); sub(/^warning$/, "warnings", word); sum[word] += $(i - 1)
        }
        if ($(i - 1) == "in") { sub(/s$/, "", word); seconds += word }
    } }
    END {
        split("failed errors passed skipped xfailed xpassed warnings", order, " ")
        for (i = 1; i <= 7; i++) if (sum[order[i]]) line = line (line ? ", " : "") sum[order[i]] " " order[i]
        printf "==== %s in %.1fs ====\n", line ? line : "no tests ran", seconds
    }' <<<"$(sed 's/\x1b\[[0-9;]*m//g' <<<"$summaries")"
[[ $failed != 0 || -n $found ]] || failed=5
exit "$failed"
