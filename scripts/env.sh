# Sourced by the scripts beside it: makes .venv when there is none and installs what the project needs, at the
# tested versions of constraints.txt. A stamp keeps later runs instant; it changes with the requirement files.
# Usage: . scripts/env.sh [extra]      e.g. `. scripts/env.sh dev`

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra="${1:-}"
venv="${OSTINATO_VENV:-.venv}"
python="${PYTHON:-python3}"

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "ostinato needs Python 3.11 or newer; '$python' is not. Set PYTHON=/path/to/python3.11" >&2
    exit 2
fi

stamp="$venv/.installed-${extra:-run}"
want="$(cat pyproject.toml constraints.txt | cksum)"
if [ ! -x "$venv/bin/python" ]; then
    echo "Making a virtual environment in $venv ..." >&2
    "$python" -m venv "$venv"
fi
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
    echo "Installing ostinato${extra:+[$extra]} and what it needs (a few minutes the first time) ..." >&2
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    # torch first, alone: packages that depend on it would otherwise choose a build of their own.
    "$venv/bin/python" -m pip install --quiet -c constraints.txt torch
    "$venv/bin/python" -m pip install --quiet -c constraints.txt -e ".${extra:+[$extra]}"
    echo "$want" >"$stamp"
fi
export PATH="$PWD/$venv/bin:$PATH"
