#!/usr/bin/env bash
# Fine-tunes a small real model twice, with stock PEFT and with peft_fastlora, and compares the two. Needs nothing but
# python3 with its venv module; sets up what is missing, which takes a few minutes the first time.
#
#   bash scripts/demo.sh                        SmolLM2-135M-Instruct on scripts/data/lora_questions.jsonl
#   bash scripts/demo.sh --dtype float32        any option of scripts/demo.py; --help lists them
#
# PYTHON names another interpreter than python3.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

python="${PYTHON:-python3}"
venv="$root/.venv-demo"
stamp="$venv/.installed"

# True when everything was installed after the last change of what is to be installed.
is_installed() {
    local file
    [[ -f "$stamp" ]] || return 1
    for file in "$root"/setup.cfg "$root"/constraints*.txt; do
        [[ "$file" -nt "$stamp" ]] && return 1
    done
    "$venv/bin/python" -c 'import torch.version' >/dev/null 2>&1
}

# In a subshell at the root: constraints.txt names its neighbour by a relative path.
install() (
    cd "$root"
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "scripts/demo.sh: the newest transformers needs Python 3.11 or later, $python is" \
            "$("$python" --version 2>&1); set PYTHON to another interpreter" >&2
        exit 1
    fi
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --clear "$venv"
    fi
    rm -f "$stamp"
    # torch first and exactly: otherwise the resolver may look at several releases of the largest download of all.
    torch="$(grep -h '^torch==' constraints*.txt | head -n 1)"
    "$venv/bin/python" -m pip install --disable-pip-version-check "$torch" -c constraints.txt
    "$venv/bin/python" -m pip install --disable-pip-version-check -c constraints.txt -e ".[demo]"
    touch "$stamp"
)

if ! is_installed; then
    echo "== setting up .venv-demo"
    install
fi
exec "$venv/bin/python" "$root/scripts/demo.py" "$@"
