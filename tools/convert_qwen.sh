#!/bin/sh
# Another name of convert_qwen_h2g.sh.
set -eu
exec sh "$(dirname "$0")/convert_qwen_h2g.sh" "$@"
