#pragma once

#include "capability.h"
#include "dmtp/commit_kv.h"

DMTP_CPU_KERNEL(commit_kv, CommitKV)
