#!/usr/bin/env bash
# All checks, cheap ones first; the first red one ends the run.
#
#   bash tests/run.sh                                all but the long learning runs
#   bash tests/run.sh --full                         those too
#   bash tests/run.sh --tier lint --tier unit        only these: format lint imports structure types unit dist ray engine
#                                                    learning gpu long
#   bash tests/run.sh --tier unit -- -x -k balance   what follows `--` goes to pytest
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
checks=(format lint imports structure types)
marks=(dist ray engine learning gpu long) # a test with several marks runs in the tier of its last one
declare -A minutes=([structure]=5 [unit]=10 [dist]=20 [ray]=30 [engine]=15 [learning]=15 [gpu]=15 [long]=240)
all=("${checks[@]}" unit "${marks[@]}")

usage() {
    printf '%s\n' "$1" "usage: bash tests/run.sh [--full] [--tier NAME]... [-- PYTEST ARGUMENTS]; tiers: ${all[*]}" >&2
    exit 2
}

tiers=()
full=""
while (($#)); do
    case "$1" in
        --full) full=yes ;;
        --tier)
            [[ " ${all[*]} " == *" ${2:-} "* ]] || usage "there is no tier '${2:-}'"
            tiers+=("$2")
            shift
            ;;
        --)
            shift
            break
            ;;
        *) usage "unknown argument '$1'" ;;
    esac
    shift
done
if ((${#tiers[@]} == 0)); then
    tiers=("${all[@]}")
    [[ -n "$full" ]] || unset 'tiers[-1]'
fi

bash "$root/docker/environment.sh"
cd "$root"
bin="$root/.venv/bin"
output="$(mktemp)"
trap 'rm -f "$output"' EXIT
passed=0 failed=0 skipped=0 times=""
color=no
[[ ! -t 1 ]] || color=yes

# pytest with a time limit; its counts are added up for the last line. Exit code 5 means that no test was chosen.
run_pytest() {
    local name="$1" code=0 last count word
    shift
    timeout --foreground --kill-after=30 "${minutes[$name]}m" "$bin/python" -m pytest --color="$color" "$@" 2>&1 | tee "$output" || code=$?
    last="$(tail -n 5 "$output" | grep -aE ' in [0-9.]+s' || true)"
    while read -r count word; do
        case "$word" in
            passed) passed=$((passed + count)) ;;
            failed | error*) failed=$((failed + count)) ;;
            skipped) skipped=$((skipped + count)) ;;
        esac
    done < <(grep -aoE '[0-9]+ (passed|failed|errors?|skipped)' <<<"$last")
    ((code != 124)) || printf 'tier %s: stopped after %s minutes\n' "$name" "${minutes[$name]}"
    ((code != 5)) || printf 'tier %s: no tests\n' "$name"
    ((code == 0 || code == 5))
}

# Tests that carry the mark and none that comes later. Only files that name the mark are loaded: imports take seconds.
run_marked() {
    local name="$1" later="" mark seen="" files
    shift
    for mark in "${marks[@]}"; do
        [[ -z "$seen" ]] || later="$later and not $mark"
        [[ "$mark" != "$name" ]] || seen=yes
    done
    mapfile -t files < <(grep -rlE --include='test_*.py' "mark\.$name\b" tests || true)
    if [[ "$name" == gpu && -d tests/gpu ]]; then files+=(tests/gpu); fi
    if ((${#files[@]} == 0)); then
        printf 'tier %s: no tests\n' "$name"
        return
    fi
    run_pytest "$name" -m "$name$later" "${files[@]}" "$@"
}

run_tier() {
    local name="$1" unmarked
    shift
    case "$name" in
        format) "$bin/ruff" format --check --quiet . ;;
        lint) "$bin/ruff" check . ;;
        imports) "$bin/lint-imports" --no-logo ;;
        structure) run_pytest structure tests/test_structure.py "$@" ;;
        types) PYRIGHT_PYTHON_IGNORE_WARNINGS=1 "$bin/pyright" ;;
        unit)
            printf -v unmarked ' or %s' "${marks[@]}"
            run_pytest unit -m "not (${unmarked# or })" --ignore=tests/test_structure.py --numprocesses 2 --dist loadfile \
                --jaxtyping-packages=vrl.algorithms,vrl.models,beartype.beartype tests "$@"
            ;;
        *) run_marked "$name" "$@" ;;
    esac
}

red=""
for tier in "${tiers[@]}"; do
    printf '\n== %s\n' "$tier"
    begin=$SECONDS
    run_tier "$tier" "$@" || red="$tier"
    times+="$(printf '%-10s %5d s' "$tier" $((SECONDS - begin)))"$'\n'
    [[ -z "$red" ]] || break
done
printf '\n%s' "$times"
if [[ -n "$red" ]]; then
    ((failed > 0)) || failed=1
    printf 'tier %s failed\n' "$red"
fi
printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
[[ -z "$red" ]]
