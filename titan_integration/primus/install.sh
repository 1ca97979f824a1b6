#!/usr/bin/env bash
# For primus-cli's --patch: zbpipe and what it needs, without touching the image's torch and numpy.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
pip install --quiet --no-deps "$here" click numba llvmlite rich markdown-it-py mdurl pygments
