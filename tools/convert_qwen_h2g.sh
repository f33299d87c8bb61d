#!/bin/sh
exec sh "$(dirname "$0")/../scripts/convert_qwen_h2g.sh" "$@"
