#!/bin/sh
# Another name of convert_llama_h2g.sh.
set -eu
exec sh "$(dirname "$0")/convert_llama_h2g.sh" "$@"
