#!/bin/sh
. "$(dirname "$0")/../../../../scripts/profile_hardware.sh" # read, not started: it writes beside $0
