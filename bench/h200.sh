#!/usr/bin/env bash
# One run on a CUDA machine, in under eight minutes: checks first, then speed.
#
#   bench/h200.sh [results folder, default bench/results]
#
# Nothing needs to be installed: the repository is used where it is, with the
# torch, triton, pytest and pytest-benchmark of $PYTHON (default python3). Every
# stage has its time cap; the first check that fails ends the run, so no speed is
# ever written behind a failing check. Exit code 3: there is no GPU.
#
# Speed has a process for each op at the shape of a 124M model, then for each suite of
# models (bench/bench_NAME.py, where the trainer's packages are there), then for each op at
# the other shapes, while time lasts: a contender that takes its process down costs its
# records and an exit code of 1 at the end, an op of ours that fails ends the run.
#
# OPS="NAME ..." times only these, SUITES="NAME ..." only those (step loom moe optimizer
# decode); either may be empty, so that the time goes to the other. TUNE=1 first times
# every launch setting (python -m bench.tune) for TUNE_SECONDS (200). STEPS=1 ends with 20 steps of the 124M model at
# R = 1 and R = 7, where the trainer's packages are there. SKIP_MEMCHECK=1 leaves
# compute-sanitizer out (it is left out by itself where it is not installed).
# DEEPLOOP_COMMIT names the commit where there is no .git.
#
# With CPU_DRY_RUN=1 the same stages run without a GPU, as a test of this script;
# what they time is then the CPU path.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
results=${1:-bench/results}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
unset TRITON_INTERPRET

dry=${CPU_DRY_RUN:-0}
if [ "$dry" != 1 ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "h200.sh: $python sees no CUDA device; nothing was run"
    exit 3
fi
[ "$dry" = 1 ] && export CUDA_VISIBLE_DEVICES=

stage() { # name, seconds, command...
    local name=$1 limit=$2 began=$SECONDS code=0
    shift 2
    local left=$((470 - SECONDS))
    [ "$limit" -gt "$left" ] && limit=$left
    if [ "$limit" -lt 1 ]; then
        echo "h200.sh: no time left for $name; nothing after it was run"
        exit 1
    fi
    echo "== $name (at most $limit s)"
    timeout --kill-after=10 "$limit" "$@" || code=$?
    if [ "$code" != 0 ]; then
        [ "$code" = 124 ] && echo "h200.sh: $name took more than $limit s"
        echo "h200.sh: $name failed (exit code $code); nothing after it was run"
        exit 1
    fi
    echo "== $name: passed in $((SECONDS - began)) s"
}

# The tests' own settings come from tests/kernels alone: the folder above it needs
# packages of the trainer.
tests=("$python" -m pytest -q -p no:cacheprovider --confcutdir=tests/kernels tests/kernels)
spread=()
if [ "$dry" != 1 ] && "$python" -c 'import xdist' 2>/dev/null; then
    spread=(-n 12) # most of the time goes into compiling, on the CPU
fi
if [ "$dry" = 1 ]; then marked=(-m gpu --collect-only); else marked=(-m gpu); fi
mkdir -p "$results"
name=$results/kernels-$(date -u +%Y%m%dT%H%M%SZ)

stage environment 60 "$python" -m bench.checks environment
stage "GPU tests" 200 "${tests[@]}" "${marked[@]}" "${spread[@]}" -k "not past_two_to"
# Alone: each of these fills tens of GiB.
stage "GPU tests of large offsets" 60 "${tests[@]}" "${marked[@]}" -k past_two_to
if "$python" -c 'import hypothesis, rich, safetensors, tyro' 2>/dev/null; then
    stage "GPU tests of the models" 90 "$python" -m pytest -q -p no:cacheprovider \
        tests/test_model_gpu.py "${marked[@]}"
else
    echo "== GPU tests of the models: skipped, the trainer's packages are not there"
fi
stage "first launches" 90 "$python" -m bench.checks warm
if [ "${SKIP_MEMCHECK:-0}" = 1 ]; then
    echo "== memcheck: skipped, SKIP_MEMCHECK=1"
elif command -v compute-sanitizer >/dev/null; then
    # Without PyTorch's memory cache, so that every tensor ends where its memory does.
    stage memcheck 120 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
        compute-sanitizer --tool memcheck --error-exitcode 9 "$python" -m bench.checks once
else
    echo "== memcheck: skipped, no compute-sanitizer on the PATH"
fi
stage determinism 60 "$python" -m bench.checks determinism

if [ "${TUNE:-0}" = 1 ] && [ "$dry" != 1 ]; then
    seconds=${TUNE_SECONDS:-200}
    stage tune $((seconds + 40)) "$python" -m bench.tune --seconds "$seconds" \
        --out "$name-tune.json"
fi

failed=0
speed() { # what, part, bench file, pytest's -k, seconds at most, seconds of a case
    local json=$name-$1-$2.json left=$((440 - SECONDS)) code=0
    if [ "$left" -lt 30 ]; then
        echo "== speed of $1, $2: no time left"
        return
    fi
    [ "$left" -gt "$5" ] && left=$5
    echo "== speed of $1, $2 (at most $left s)"
    # A case that has begun must still end inside the cap.
    DEEPLOOP_BENCH_OPS=$1 DEEPLOOP_BENCH_SECONDS=$((left > $6 ? left - $6 : 1)) \
        DEEPLOOP_BENCH_COMPILE_SECONDS=$((left / 3)) timeout --kill-after=10 "$left" \
        "$python" -m pytest -q -p no:cacheprovider "bench/$3" -k "$4" \
        --benchmark-json="$json" || code=$?
    if [ "$code" = 9 ]; then
        echo "h200.sh: $1 failed; nothing after it was run"
        exit 1
    elif [ "$code" != 0 ] && [ "$code" != 5 ]; then # 5: no such case
        echo "h200.sh: $1, $2: it ended with exit code $code; records are missing"
        failed=1
    fi
    [ -s "$json" ] || rm -f "$json"
}

ops=$("$python" -m deeploop.kernels.registry) suites="step loom moe optimizer decode"
main=65536x768
[ "$dry" = 1 ] && main=1024x768 ops=post_sandwich suites=optimizer # the CPU has this shape alone
ops=${OPS-$ops} suites=${SUITES-$suites}
if ! "$python" -c 'import tyro, rich, safetensors' 2>/dev/null; then
    echo "== suites of models: skipped, the trainer's packages are not there"
    suites=
fi
for op in $ops; do speed "$op" main bench_kernels.py "$main" 90 20; done
for suite in $suites; do speed "$suite" suite "bench_$suite.py" "test_" 150 70; done
for op in $ops; do speed "$op" others bench_kernels.py "not $main" 90 20; done
shopt -s nullglob
files=("$name"-*-main.json "$name"-*-suite.json "$name"-*-others.json)
if [ ${#files[@]} = 0 ]; then
    echo "h200.sh: nothing was timed"
    exit 1
fi
timeout 60 "$python" -m bench.report "${files[@]}" --plots "$name" >"$name.md"
cat "$name.md"
echo "== written: ${files[*]} $name.md $name/*.png, $SECONDS s in all"

steps() { # loops
    local out limit=$((470 - SECONDS))
    [ "$limit" -gt 90 ] && limit=90
    [ "$limit" -lt 20 ] && { echo "== 20 steps at R = $1: no time left" && return; }
    out=$(mktemp -d)
    echo "== 20 steps at R = $1 (at most $limit s)"
    timeout --kill-after=10 "$limit" "$python" -m deeploop.cli train "gpt2-small-r$1-deeploop" \
        --data.tokenizer byte --steps 20 --train.compile --train.batch-size 16 \
        --train.log-every 5 --train.eval-every 0 --train.save-every 0 \
        --train.eval-tokens 1024 --out "$out/run" || failed=1
    rm -rf "$out"
}

if [ "${STEPS:-0}" = 1 ] && [ "$dry" != 1 ]; then
    if "$python" -c 'import tyro, rich, safetensors' 2>/dev/null; then
        for loops in 1 7; do steps "$loops"; done
    else
        echo "== training steps: skipped, the trainer's packages are not there"
    fi
fi
exit $failed
