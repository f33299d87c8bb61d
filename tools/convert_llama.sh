#!/bin/sh
exec sh "$(dirname "$0")/../scripts/convert_llama_h2g.sh" "$@"
