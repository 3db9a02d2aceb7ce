#pragma once

#include "capability.h"
#include "dmtp/block_attention.h"

DMTP_CPU_KERNEL(block_attention, BlockAttention)
