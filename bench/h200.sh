#!/usr/bin/env bash
# One run on a CUDA machine, in under eight minutes: checks first, then speed.
#
#   bench/h200.sh [results folder, default bench/results]
#
# Nothing needs to be installed: the repository is used where it is, with the
# torch, triton, pytest and pytest-benchmark of $PYTHON (default python3). Every
# stage has its time cap; the first one that fails ends the run, so no speed is
# ever written behind a failing check. Exit code 3: there is no GPU.
#
# SKIP_MEMCHECK=1 leaves compute-sanitizer out (it is left out by itself where it
# is not installed). DEEPLOOP_COMMIT names the commit where there is no .git.
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

left=$((460 - SECONDS))
# A case that has begun must still end inside the cap.
export DEEPLOOP_BENCH_SECONDS=$((left - 45))
stage speed "$left" "$python" -m pytest -q -p no:cacheprovider bench/bench_kernels.py \
    --benchmark-json="$name.json"
timeout 60 "$python" -m bench.report "$name.json" --png "$name.png" >"$name.md"
cat "$name.md"
echo "== written: $name.json $name.md $name.png, $SECONDS s in all"
