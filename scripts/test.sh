#!/usr/bin/env bash
# Sets up and runs every check of the project; needs nothing but python3 with its venv module.
#
#   bash scripts/test.sh                   lint, newest, oldest, mutants, peft-suite-sample
#   bash scripts/test.sh newest            one environment of tox.ini, or several
#   bash scripts/test.sh oldest -- -k bias what follows "--" goes to the commands of the environments
#
# PYTHON names another interpreter than python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
venv=.venv

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "scripts/test.sh: the newest transformers needs Python 3.11 or later, $python is $("$python" --version 2>&1);" \
        "set PYTHON to another interpreter" >&2
    exit 1
fi

environments=()
while [[ $# -gt 0 && "$1" != -- ]]; do
    environments+=("$1")
    shift
done
if [[ ${#environments[@]} -eq 0 ]]; then
    environments=(lint newest oldest mutants peft-suite-sample)
fi

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "== setting up $venv"
    "$python" -m venv --clear "$venv"
fi
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt tox

echo "== running: ${environments[*]}"
exec "$venv/bin/python" -m tox run -e "$(IFS=,; echo "${environments[*]}")" "$@"
