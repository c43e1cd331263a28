#!/usr/bin/env bash
# All that needs an NVIDIA GPU: tests, parity, then the benchmarks, their figures and plots in a folder.
#   PYTHON=.venv/bin/python scripts/gpu_check.sh [FOLDER, build/gpu by default] [geometries, "135m 1b 8b" by default]
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ ${1:-} == -* ]]; then
    sed -n 2,3p scripts/gpu_check.sh | cut -c3-
    exit $([[ $1 == -h || $1 == --help ]] && echo 0 || echo 2)
fi
python=${PYTHON:-.venv/bin/python} out=${1:-build/gpu} geometries=${2:-135m 1b 8b}
if ! command -v "$python" > /dev/null; then
    echo "gpu_check: no $python: run make setup EXTRAS=cuda,dev, or set PYTHON" >&2
    exit 2
fi
PYTHONPATH=scripts${PYTHONPATH:+:$PYTHONPATH} "$python" - << 'END'
import arguments
arguments.run(lambda _: arguments.need_gpu("this is for machines that have one"))
END
models=$(mktemp -d)
trap 'rm -rf "$models"' EXIT
mkdir -p "$out"

"$python" -m pytest ${PYTEST_ARGS:-} tests/gpu --numprocesses="${WORKERS:-4}" --dist=loadgroup | tee "$out/tests.txt"
"$python" scripts/sampler_parity.py --device cuda --selftest --trials 1000 | tee "$out/sampler_parity.txt"
for cases in "--cases tests/data/block_topk.json" --selftest --active; do
    "$python" scripts/topk_parity.py --device cuda $cases | tee "$out/topk_parity${cases%% *}.txt"
done

beside=()
for geometry in $geometries; do
    type=Q4_0
    [ "$geometry" = 135m ] && type=Q4_1
    "$python" scripts/make_gguf.py "$geometry" --type $type --out "$models/$geometry.gguf"
    "$python" scripts/bench_engine.py "$models/$geometry.gguf" --device cuda --json "$out/$geometry.json" \
        --plot "$out/engine.png" --beside ${beside[@]+"${beside[@]}"} | tee "$out/$geometry.txt"
    beside+=("$out/$geometry.json")
    rm "$models/$geometry.gguf"
done
# what asking for sampling costs, at a large vocabulary
"$python" scripts/make_gguf.py 1b --type Q4_0 --vocab 248320 --out "$models/wide.gguf"
"$python" scripts/bench_engine.py "$models/wide.gguf" --device cuda --requests 1 --prompts 512 | tee "$out/wide.txt"
"$python" scripts/bench_sampler.py --device cuda --json "$out/sampler.json" --plot "$out/sampler.png" | tee "$out/sampler.txt"
"$python" scripts/bench_topk.py --out "$out" | tee "$out/topk.txt"
