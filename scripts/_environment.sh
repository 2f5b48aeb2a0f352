# Sourced by the scripts: a Python environment with what they need, and the native libraries.
#
#   environment EXTRA...   uses the virtual environment that is active, else makes .venv; installs what is missing of the
#                          named extras of pyproject.toml; sets PYTHON
#   tools EXTRA...         the same, but leaves an active environment as it is
#   explain SCRIPT ARG...  prints the comment at the script's head and ends, where an argument before -- asks for help
#   pip_install ARG...     pip install; where that fails, says how to do without a network
#   build                  builds the native libraries in place where their sources are newer
#
# MOE_OPS_TORCH names the torch to install where there is none (default torch==2.13.0; a local or CPU build can be named).

tools() {
  if [ -n "${VIRTUAL_ENV:-}" ]; then PYTHON="$VIRTUAL_ENV/bin/python"; else environment "$@"; fi
}

environment() {
  if [ -n "${VIRTUAL_ENV:-}" ]; then
    PYTHON="$VIRTUAL_ENV/bin/python"
  else
    if [ ! -x .venv/bin/python ]; then
      local python
      python=$(find_python) || { echo "moe_ops needs Python 3.10 or later with the venv module" >&2; return 1; }
      echo "making the virtual environment .venv with $("$python" --version)" >&2
      "$python" -m venv .venv
    fi
    PYTHON="$PWD/.venv/bin/python"
    VIRTUAL_ENV="$PWD/.venv"
    PATH="$VIRTUAL_ENV/bin:$PATH"
    export VIRTUAL_ENV PATH
  fi
  local wanted stamp="$VIRTUAL_ENV/.moe_ops_requirements"
  wanted=$("$PYTHON" scripts/_requirements.py "$@")
  # Installed by an earlier run: each line of what is wanted is in the stamp.
  if [ -f "$stamp" ] && [ -z "$(comm -23 <(sort <<<"$wanted") <(sort "$stamp"))" ]; then return 0; fi
  if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
    echo "installing ${MOE_OPS_TORCH:-torch==2.13.0}" >&2
    pip_install "${MOE_OPS_TORCH:-torch==2.13.0}"
  fi
  echo "installing the requirements of: the project $*" >&2
  # The constraint keeps the torch that is here: no requirement may replace it.
  local constraint
  constraint=$(mktemp)
  "$PYTHON" -c 'import torch; print("torch==" + torch.__version__)' >"$constraint" 2>/dev/null
  printf '%s\n' "$wanted" | pip_install --constraint "$constraint" --requirement /dev/stdin
  rm -f "$constraint"
  { [ ! -f "$stamp" ] || cat "$stamp"; printf '%s\n' "$wanted"; } | sort -u >"$stamp.new"
  mv "$stamp.new" "$stamp"
}

pip_install() {
  "$PYTHON" -m pip install --quiet --disable-pip-version-check "$@" || {
    echo "$0: the above is missing in $VIRTUAL_ENV and was not installed. Without a network: download wheels elsewhere" >&2
    echo "(pip download) and set PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER, or use an environment that has all of it." >&2
    return 1
  }
}

explain() {
  local script=$1 word
  for word in "${@:2}"; do
    case "$word" in
      --) return 0 ;;
      --help | -h) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$script"; exit 0 ;;
    esac
  done
}

find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
      echo "$candidate"
      return 0
    fi
  done
  return 1
}

build() {
  local log
  log=$(mktemp)
  if ! "$PYTHON" setup.py build_ext --inplace >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    return 1
  fi
  grep 'is left out' "$log" >&2 || true
  rm -f "$log"
}
